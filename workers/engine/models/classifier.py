"""Implement classification heads: labels from config.json, and the head of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.head import load_dense
from workers.engine.models.pooling_config import PoolingConfig

_FUNCTIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
_BY_PROBLEM = {"regression": "none", "multi_label_classification": "sigmoid"}


def classifier_config(raw: Json, modes: tuple[str, ...]) -> PoolingConfig:
    """Return the labels of a config.json, and the function over their logits.

    The function is that of sentence-transformers' entry for a cross-encoder, else that of the
    problem type, else sigmoid for one label and softmax for more.

    Raises ModelLoadError.
    """
    names = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    named = (raw.get("sentence_transformers") or {}).get("activation_fn") or raw.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        activation = _BY_PROBLEM.get(str(raw.get("problem_type")), "softmax" if len(labels) > 1 else "sigmoid")
        return PoolingConfig(modes, labels=labels, activation=activation)
    name = str(named).rpartition(".")[2]
    if name not in _FUNCTIONS:
        raise ModelLoadError(
            f"config.json asks for the activation {name!r} over scores; supported are {', '.join(_FUNCTIONS)}"
        )
    return PoolingConfig(modes, labels=labels, activation=_FUNCTIONS[name])


def first_token(raw: Json) -> tuple[str, ...]:
    """Return the pooling of BERT's heads: the first token."""
    return ("cls",)


def last_token(raw: Json) -> tuple[str, ...]:
    """Return the pooling of a decoder's head: the last token."""
    return ("last",)


def score_head(raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
    """Return the head of a decoder, which reads its last token."""
    return [load_dense(weights, "score", config.hidden_size, labels, bias=False)]
