"""Implement RoBERTa and XLM-RoBERTa: BERT with positions that begin after the padding's."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json, ModelConfig, require
from workers.engine.models.encoder import BERT_NAMES, PostNormEncoder, encoder_config
from workers.engine.models.head import load_dense


def first_position(raw: Json) -> int:
    """Return the row of a text's first token in the table of positions. Raise ModelLoadError."""
    padding = raw.get("pad_token_id", 1)
    if not isinstance(padding, int):
        raise ModelLoadError(
            f"config.json has the pad_token_id {padding!r}, behind which RoBERTa's positions begin; set the token's id,"
            " which is 1 in RoBERTa's vocabulary"
        )
    return padding + 1


def config(raw: Json) -> ModelConfig:
    positions = require(raw, "max_position_embeddings", 512) - first_position(raw)
    return encoder_config({"vocab_size": 50265, **raw}, positions)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> PostNormEncoder:
    return PostNormEncoder(config, BERT_NAMES, weights, first_position(raw), require(raw, "type_vocab_size", 2))


def head(raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
    size = config.hidden_size
    return [
        load_dense(weights, "classifier.dense", size, size, activation="tanh"),
        load_dense(weights, "classifier.out_proj", size, labels),
    ]
