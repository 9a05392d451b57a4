"""The mean Kullback-Leibler divergence of next tokens over a text of random tokens, of a model in 8
or 4 bits from the same model in float32.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.models import INT4, model_folder, settings_of
from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.attention.context import StepAttention, cached_layers
from workers.engine.backends.registry import default_backend
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.layers.base import Ops
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.models.base import DecoderModel

_CPU, _BLOCK, _TOKENS = torch.device("cpu"), 16, 512


def divergence_in_int8(model: str, seed: int) -> dict[str, Any]:
    """Return the figures of `_divergence` for `--quantization int8`."""
    return _divergence(model, _load(model, Int8Ops(_ops())), seed)


def divergence_in_int4(model: str, seed: int) -> dict[str, Any]:
    """Return the figures of `_divergence` for the same model's checkpoint of 4 bits."""
    return _divergence(model, _load(model + INT4, _ops()), seed)


def _divergence(model: str, in_few_bits: DecoderModel, seed: int) -> dict[str, Any]:
    """Return `divergence` in nats, and the share of tokens with the same likeliest next token."""
    prompt = torch.from_numpy(np.random.default_rng(seed).integers(0, settings_of(model)["vocab_size"], _TOKENS))
    exact, quantized = (_log_probabilities(each, prompt) for each in (_load(model, _ops()), in_few_bits))
    apart = (exact.exp() * (exact - quantized)).sum(-1)
    same = (exact.argmax(-1) == quantized.argmax(-1)).float().mean()
    return {"model": model, "divergence": float(f"{apart.mean():.3g}"), "same_token_share": round(float(same), 4)}


def _ops() -> Ops:
    return default_backend(_CPU, torch.float32).ops


def _load(model: str, ops: Ops) -> DecoderModel:
    return load_weights(open_checkpoint(str(model_folder(model))), torch.float32, _CPU, _TOKENS, ops)


@torch.inference_mode()
def _log_probabilities(model: DecoderModel, prompt: Tensor) -> Tensor:
    """Return the log-probabilities of the next token at each token of a prompt, [T, vocab]."""
    config, backend, length = model.config, default_backend(_CPU, torch.float32), len(prompt)
    blocks = length // _BLOCK
    first = config.layers[0]
    shape = CacheShape(1 + blocks, _BLOCK, first.kv_heads, first.head_dim)
    layers = cached_layers(backend.attention(shape, first.heads, torch.float32, _CPU), config.layers)
    metadata = AttentionMetadata(
        _BLOCK + torch.arange(length),
        np.array([0, length], np.int32),
        np.array([length], np.int32),
        1 + np.arange(blocks, dtype=np.int32)[None],
    )
    positions = torch.arange(length)
    attend = StepAttention(layers, [metadata])
    hidden = model.forward(prompt, positions, torch.full_like(positions, length), attend)
    return model.logits(hidden).log_softmax(-1)
