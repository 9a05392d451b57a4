"""Run any pooling model of transformers without a file of its own: by its class, on a step's texts
padded to batches.

The class computes its own attention, so the paged cache is not used. Once its weights are loaded it
is checked against its own output: texts in a batch must give the same numbers as each text alone.
Importing this module takes seconds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from workers.engine.layers.base import AttentionContext, AttentionPattern, AttentionShape
from workers.engine.layers.weights import Weights
from workers.engine.models.base import EncoderModel
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.transformers_model import (
    Pretrained,
    Settings,
    read_settings,
    read_weights,
    refused_as,
)
from workers.engine.models.transformers_source import refusal

_TRIED_LENGTHS = (3, 4, 9, 12, 17)  # tokens of the texts checked at start, besides the longest and 3/4 of it
_LONGEST_TRIED = 512
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_CACHED_NUMBERS = 16  # per token in the paged cache, which is never read


@dataclass(frozen=True, slots=True)
class PaddedClass:
    """A class of transformers that returns hidden states, or a classifier's logits."""

    model_class: Pretrained
    settings: Settings
    config: ModelConfig
    causal: bool  # whether tokens attend only to earlier ones

    def head_modes(self, raw: Json) -> tuple[str, ...]:
        return ("cls",)  # where `PaddedModel` puts the logits


class PaddedModel(EncoderModel):
    """A model run by transformers' class.

    For a classifier, the logits replace the hidden states of each of the text's tokens.
    """

    def __init__(self, found: PaddedClass, module: Pretrained, weights: Weights) -> None:
        super().__init__(weights)
        self._module = module
        self._attend: AttentionContext | None = None  # of the running step
        for layers in module.modules():
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                layer.register_forward_pre_hook(self._check_interruption)
        self.padding = int(getattr(found.settings, "pad_token_id", None) or 0)
        types = (getattr(found.settings, "type_vocab_size", None) or 0) > 1
        self._takes_types = types and "token_type_ids" in _parameters(found.model_class)

    def forward(
        self, input_ids: Tensor, positions: Tensor, types: Tensor | None, attend: AttentionContext | None = None
    ) -> Tensor:
        self._attend = attend
        lengths = _lengths(positions)
        texts = torch.split(input_ids, lengths)
        by_text = torch.split(types, lengths) if types is not None and self._takes_types else None
        outputs: dict[int, Tensor] = {}
        for batch in _batches(lengths):
            more = {} if by_text is None else {"token_type_ids": _padded([by_text[i] for i in batch])}
            outputs |= zip(batch, self._run([texts[i] for i in batch], **more), strict=True)
        return torch.cat([outputs[i] for i in range(len(lengths))])

    def alone(self, input_ids: Tensor) -> Tensor:
        """Return the output of the class for one text without any padding, in the form of
        `forward`.
        """
        return _values(self._module(input_ids=input_ids[None]))[0].expand(len(input_ids), -1)

    def _check_interruption(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._attend is not None:
            self._attend.check_interruption()

    def _run(self, texts: Sequence[Tensor], **more: Tensor) -> Iterator[Tensor]:
        mask = _padded([torch.ones_like(text) for text in texts])
        values = _values(self._module(input_ids=_padded(texts, self.padding), attention_mask=mask, **more))
        return (rows[: len(text)].expand(len(text), -1) for rows, text in zip(values, texts, strict=True))


def find_padded_class(folder: Path, raw: Json, task: str) -> PaddedClass:
    """Return transformers' class for a checkpoint that embeds or classifies.

    Raises ModelLoadError with the reason if it cannot run here.
    """
    name = str(raw["architectures"][0])
    settings = read_settings(folder, raw)
    settings.use_cache, settings.return_dict = False, True
    with refused_as(str(refusal(name, "its configuration cannot be used"))):
        return _found(name, settings, task)


def _found(name: str, settings: Settings, task: str) -> PaddedClass:
    model_class = _class_of(name, settings, task)
    missing = sorted({"input_ids", "attention_mask"} - _parameters(model_class).keys())
    if missing:
        raise refusal(name, f"its forward takes no {' and no '.join(missing)}, which texts of other lengths need")
    kind = settings.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return PaddedClass(model_class, settings, _model_config(name, model_class, settings), causal)


def load_padded(found: PaddedClass, folder: Path, config: ModelConfig, weights: Weights) -> PaddedModel:
    """Return the model with its weights, checked against its own output; `config` has its pooling.

    Raises ModelLoadError.
    """
    module, _ = read_weights(found.model_class, found.settings, folder, weights, **_without_pooler(found.model_class))
    model = PaddedModel(found, module, weights)
    assert config.pooling is not None
    _check_batches(model, config, len(config.pooling.labels) or config.hidden_size)
    return model


def _class_of(name: str, settings: Settings, task: str) -> Pretrained:
    if not hasattr(transformers, name):
        raise refusal(name, f"transformers {transformers.__version__} has no class of that name")
    if settings.get_text_config() is not settings and not settings.is_encoder_decoder:
        raise refusal(name, "it takes more than text")
    if task != "embed":
        if name not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
            raise refusal(name, "it is no classifier of texts")
        return getattr(transformers, name)
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(settings.model_type)
    if encoder is None and settings.is_encoder_decoder:
        raise refusal(name, "it has an encoder and a decoder")
    trunk = encoder or MODEL_MAPPING_NAMES.get(settings.model_type)
    if not isinstance(trunk, str):
        raise refusal(name, "transformers has no one class for its hidden states")
    return getattr(transformers, trunk)


def _model_config(name: str, model_class: Pretrained, settings: Settings) -> ModelConfig:
    sizes: dict[str, Any] = {size: getattr(settings, size, None) for size in ("vocab_size", "hidden_size")}
    sizes["max_position_embeddings"] = _longest_text(model_class, settings)
    for size, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise refusal(name, f"its config.json has no usable {size!r} (found {value!r})")
    return ModelConfig(
        architecture=name,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=0,
        max_position_embeddings=sizes["max_position_embeddings"],
        norm_eps=0.0,
        activation="",
        tie_word_embeddings=True,
        layers=(AttentionShape(1, 1, _CACHED_NUMBERS, 1.0, AttentionPattern(causal=False)),),
    )


def _longest_text(model_class: Pretrained, settings: Settings) -> int | None:
    """Return the tokens of the longest text, or None if config.json does not set it.

    If positions have a row for padding, as in RoBERTa, rows up to it are not used by texts.
    """
    longest = getattr(settings, "max_position_embeddings", None) or getattr(settings, "n_positions", None)
    with (
        refused_as(f"transformers' {model_class.__name__} cannot be built as config.json says"),
        torch.device("meta"),
    ):
        skeleton = model_class._from_config(copy.deepcopy(settings), **_without_pooler(model_class))
    for path, module in skeleton.named_modules():
        is_table = path.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_table and module.padding_idx is not None:
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return longest


def _without_pooler(model_class: Pretrained) -> dict[str, bool]:
    """Return the argument that omits BERT's unused layer for pairs of sentences."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(model_class).parameters else {}


@torch.inference_mode()
def _check_batches(model: PaddedModel, config: ModelConfig, size: int) -> None:
    """Raise ModelLoadError if a text's output in a batch differs from its output alone by more than
    rounding explains.
    """
    name = config.architecture
    texts = _tried_texts(config, model.padding)
    ids, positions = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    with refused_as(str(refusal(name, "it fails on texts of different lengths"))):
        together = model.forward(ids.to(model.device), positions.to(model.device), None)
        pairs = zip(torch.split(together, [len(text) for text in texts]), texts, strict=True)
        apart = max(_apart(rows, model.alone(text.to(model.device))) for rows, text in pairs)
    if together.shape[1] != size:
        raise refusal(name, f"it returns {together.shape[1]} numbers, but config.json implies {size}")
    if not apart <= _TOLERANCES[model.dtype]:
        raise refusal(
            name,
            f"a text's output in a batch differs from its output alone by {apart:.2g} of its size;"
            " choose another model",
        )


def _apart(rows: Tensor, alone: Tensor) -> float:
    """Return the distance of numbers from those of the text alone, relative to the size of the
    latter.
    """
    return float((rows.float() - alone.float()).norm() / alone.float().norm().clamp(min=1e-20))


def _tried_texts(config: ModelConfig, padding: int) -> list[Tensor]:
    """Return random texts without the padding token; a batch of several is padded."""
    generator = torch.Generator().manual_seed(0)
    longest = min(config.max_position_embeddings, _LONGEST_TRIED)
    lengths = [*(length for length in _TRIED_LENGTHS if length < longest), max(1, longest * 3 // 4), longest]
    drawn = [torch.randint(0, config.vocab_size - 1, (length,), generator=generator) for length in lengths]
    return [text + (text >= padding) for text in drawn]


def _values(outputs: Any) -> Tensor:
    """Return hidden states [texts, tokens, size], or a classifier's logits [texts, 1, labels]."""
    logits: Tensor | None = getattr(outputs, "logits", None)
    hidden: Tensor = outputs.last_hidden_state if logits is None else logits[:, None]
    return hidden


def _lengths(positions: Tensor) -> list[int]:
    """Return the number of tokens of each text; each text begins at position 0."""
    starts = (positions == 0).nonzero().flatten().tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return the texts of each batch, such that at least half of each row is not padding."""
    batches: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or lengths[text] > 2 * lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(text)
    return batches


def _padded(rows: Sequence[Tensor], padding: int = 0) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=padding)


def _parameters(model_class: Pretrained) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model_class.forward).parameters
