"""Check a class of transformers once its weights are loaded: the windows of its masks, whether its
output on a paged cache equals that of its own attention, and whether a CUDA graph reproduces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.attention.context import StepAttention, cached_layers
from workers.engine.attention.reference import TorchAttention
from workers.engine.cuda.graphs import CudaRecorder, Work
from workers.engine.cuda.out_of_memory import one_line
from workers.engine.layers.base import AttentionPattern, RotaryHeads
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.layers.weights import Weights
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import ModelConfig
from workers.engine.models.transformers_attention import ALL_BEFORE, MASKED, OTHER, PAGED, LayerCall
from workers.engine.models.transformers_model import (
    TransformersClass,
    TransformersModel,
    read_weights,
    refused_as,
)
from workers.engine.models.transformers_source import refusal

logger = logging.getLogger(__name__)

_BLOCK = 4
_TABLE = (5, 1, 4, 2)  # blocks of the prompt's cache, unordered
_STEPS = [6, 5, 1]  # tokens of each: two chunks, across blocks, and a token alone
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


def load_checked(
    found: TransformersClass,
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    max_model_len: int,
) -> TransformersModel:
    """Return the model with its weights, checked against the class's own attention.

    `config` may contain more than the class provides. Only the dtype, the device and the operations
    of `weights` are used. Raises ModelLoadError.
    """
    module, unused = read_weights(found.model_class, found.settings, folder, weights, attn_implementation=PAGED)
    if unused:
        logger.warning(
            "%s does not use %d tensors of %s; the first is %s",
            config.architecture, len(unused), folder, unused[0],
        )  # fmt: skip
    model = TransformersModel(module, found.body, config, weights, max_model_len)
    layers = zip(config.layers, patterns_by_masks(model), strict=True)
    model.config = replace(config, layers=tuple(replace(layer, pattern=pattern) for layer, pattern in layers))
    # Products with int8 may also round their inputs to 8 bits, the precision of bfloat16
    check_parity(model, torch.bfloat16 if isinstance(weights.ops, Int8Ops) else model.dtype)
    if weights.device.type == "cuda":
        model.recordable = found.model_class._can_compile_fullgraph and replays(model, CudaRecorder())
    return model


@torch.inference_mode()
def patterns_by_masks(model: TransformersModel) -> tuple[AttentionPattern, ...]:
    """Return each layer's window by its own mask, since some classes do not pass it to their
    attention.

    Raises ModelLoadError for other masks.
    """
    calls: list[LayerCall] = []
    with refused_as(_fails(model)):
        model.own_logits(torch.zeros(2, dtype=torch.int64, device=model.device), MASKED, attend=calls)
    for call in calls:
        if call.mask is None or call.mask == OTHER:
            raise refusal(model.config.architecture, f"the mask of layer {call.layer} is not a sliding window")
    seen = {call.layer: call.mask for call in calls}
    return tuple(
        AttentionPattern(
            window=seen[layer] if ALL_BEFORE < (seen[layer] or 0) < model.config.max_position_embeddings else None
        )
        for layer in range(len(model.config.layers))
    )


@torch.inference_mode()
def check_parity(model: TransformersModel, dtype: torch.dtype) -> None:
    """Raise ModelLoadError if a step's logits differ from those of the class by more than rounding
    to `dtype` explains.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.config.vocab_size, (sum(_STEPS),), generator=generator).to(model.device)
    with refused_as(_fails(model)):
        expected = torch.split(model.own_logits(prompt, "eager"), _STEPS)
        found = torch.split(_paged_logits(model, prompt), _STEPS)
    apart = max(_distance(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    if not apart <= _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16]):
        raise refusal(
            model.config.architecture, f"its logits on a paged cache differ from its own by {apart:.2g} of their size"
        )


def _fails(model: TransformersModel) -> str:
    return str(refusal(model.config.architecture, "it fails on a paged cache"))


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the difference relative to the logits, by root mean squares; an offset common to all
    logits of a token is ignored.
    """
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-20))


def _paged_logits(model: DecoderModel, prompt: Tensor) -> Tensor:
    config, device = model.config, model.device
    first = config.layers[0]
    shape = CacheShape(1 + max(_TABLE), _BLOCK, first.kv_heads, first.head_dim)
    attention = TorchAttention(shape, first.heads, model.dtype, device)
    layers = cached_layers(attention, config.layers)
    parts = []
    for first, last in zip(np.cumsum([0, *_STEPS[:-1]]), np.cumsum(_STEPS), strict=True):
        positions = np.arange(first, last)
        places = np.array(_TABLE)[positions // _BLOCK] * _BLOCK + positions % _BLOCK
        metadata = AttentionMetadata(
            torch.from_numpy(places).to(device),
            np.array([0, last - first], np.int32),
            np.array([last], np.int32),
            np.array([_TABLE], np.int32),
        )
        at = torch.from_numpy(positions).to(device)
        attend = StepAttention(layers, [metadata])
        hidden = model.forward(prompt[first:last], at, at + 1, attend)
        parts.append(model.logits(hidden))
    return torch.cat(parts)


@torch.inference_mode()
def replays(model: TransformersModel, record: Callable[[Work], Work]) -> bool:
    """Return whether a recording of the model's forward, without attention, gives the same output
    for other tokens as the forward.
    """
    vocab, device = model.config.vocab_size, model.device
    first, second = torch.arange(4, device=device) % vocab, torch.arange(7, 3, -1, device=device) % vocab
    ids, logits = first.clone(), torch.empty((4, vocab), dtype=model.dtype, device=device)

    def step() -> None:
        logits.copy_(model.head(model.forward(ids, ids, ids + 1, _NoAttention())))

    try:
        replay = record(step)
        ids.copy_(second)
        replay()
        repeated = logits.clone()
        step()
    except RuntimeError as error:
        logger.info("%s runs without CUDA graphs: %s", model.config.architecture, one_line(error))
        return False
    return _distance(repeated.float(), logits.float()) <= _TOLERANCES[torch.float32]


class _NoAttention:
    """An attention that returns each token's queries."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        return q

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads, sinks: Tensor | None = None) -> Tensor:
        raise AssertionError("transformers' classes rotate their queries and keys themselves")

    def check_interruption(self) -> None:
        return
