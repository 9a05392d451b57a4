"""Compare attention and norms with plain torch before their first use in a process.

The cases are small. The kernels may never have been tested on a similar processor. `packed.py`
compares products.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.rotary import rotate
from workers.engine.layers.weights import Weights
from workers.engine.native.attention import CpuAttention
from workers.engine.native.norms import native_norm

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_CPU, _EPS = torch.device("cpu"), 1e-6
# A head has five vectors of AVX-512: four that are computed together, and one more
_KV_HEADS, _HEAD_DIM, _BLOCK, _SCALE = 2, 80, 16, 0.25
# One row is computed in parts that begin at these positions: a prompt, another one, one token, and
# two tokens. The first part sees positions that are not in the cache, and is not compared. The keys
# of the last two parts are split at position 256 (SEGMENT of attention.h)
_PARTS = (208, 250, 290, 291, 293)
_PATTERN = AttentionPattern(window=_PARTS[1] - _PARTS[0])


@functools.cache
def attention_matches_torch(dtype: torch.dtype) -> bool:
    """Return whether attention in float32 or bfloat16 equals torch's, with each dtype of the cache.

    Raises NativeUnavailable.
    """
    caches = list(_TOLERANCE) if dtype == torch.float32 else [dtype]
    kinds = [(1, False), (3, False), (3, True)]
    right = all(_attends_as_torch(dtype, cache, *kind) for cache in caches for kind in kinds)
    if not right:
        logger.warning(
            "CPU kernels: attention in %s differs from torch's here; torch's is used, which may be slower", _name(dtype)
        )
    return right


@functools.cache
def norms_match_torch(dtype: torch.dtype) -> bool:
    """Return whether norms in float32 or bfloat16 equal torch's, with and without the mean.

    Raises NativeUnavailable.
    """
    right = all(_norms_as_torch(dtype, centered) for centered in (False, True))
    if not right:
        logger.warning(
            "CPU kernels: norms in %s differ from torch's here; torch's are used, which may be slower", _name(dtype)
        )
    return right


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attends_as_torch(dtype: torch.dtype, cache_dtype: torch.dtype, group: int, limited: bool) -> bool:
    """Compare all parts except the first, with `group` query heads per key head; if `limited`, with
    a soft cap and sinks.
    """
    generator, heads = torch.Generator().manual_seed(0), _KV_HEADS * group
    positions, skipped = torch.arange(_PARTS[0], _PARTS[-1]), _PARTS[1] - _PARTS[0]
    sizes = (len(positions), heads + 2 * _KV_HEADS, _HEAD_DIM), (_HEAD_DIM,)
    qkv, weight = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    angles = positions[:, None, None] * torch.logspace(0, -3, _HEAD_DIM // 2)
    cos, sin = torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((-angles, angles), -1).sin().to(dtype)
    norm = RMSNorm(Weights({"norm.weight": lambda: weight}, dtype, _CPU), "norm", _HEAD_DIM, _EPS)
    cap, sinks = (2.0, torch.linspace(-1, 3, heads)) if limited else (None, None)
    shape = AttentionShape(heads, _KV_HEADS, _HEAD_DIM, _SCALE, _PATTERN, soft_cap=cap)
    got = _attended(qkv, RotaryHeads(cos, sin, norm, norm), shape, sinks, cache_dtype)[skipped:]

    normed = F.rms_norm(qkv.float(), (_HEAD_DIM,), weight.float(), _EPS)
    q, k = rotate(normed, cos.float(), sin.float()).tensor_split([heads], 1)
    parts = (q[skipped:], dtype), (k[:, :_KV_HEADS], cache_dtype), (qkv[:, -_KV_HEADS:], cache_dtype)
    q, k, v = (part.to(rounded).float() for part, rounded in parts)
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * _SCALE
    scores = scores if cap is None else cap * (scores / cap).tanh()
    ahead = positions - positions[skipped:, None]
    scores = scores.masked_fill((ahead > 0) | (ahead <= -skipped), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)
    return _is_close(got, expected, cache_dtype)


def _attended(
    qkv: Tensor, rotary: RotaryHeads, shape: AttentionShape, sinks: Tensor | None, cache_dtype: torch.dtype
) -> Tensor:
    """Return the attention of the parts, for a row whose blocks are not in order."""
    blocks = -(-_PARTS[-1] // _BLOCK)
    cache_shape = CacheShape(blocks + 1, _BLOCK, _KV_HEADS, _HEAD_DIM, cache_dtype)
    attention = CpuAttention(cache_shape, shape.heads, qkv.dtype)
    (cache,), table = attention.new_cache(1), np.arange(blocks, 0, -1, dtype=np.int32)[None]
    results = []
    for first, end in pairwise(_PARTS):
        positions, now = np.arange(first, end), slice(first - _PARTS[0], end - _PARTS[0])
        slots = torch.from_numpy(table[0, positions // _BLOCK].astype(np.int64) * _BLOCK + positions % _BLOCK)
        step = AttentionMetadata(slots, np.array([0, end - first], np.int32), np.array([end], np.int32), table)
        turned = replace(rotary, cos=rotary.cos[now], sin=rotary.sin[now])
        results.append(attention.forward_rotary(qkv[now], turned, cache, step, shape, sinks))
    return torch.cat(results)


def _norms_as_torch(dtype: torch.dtype, centered: bool) -> bool:
    """Compare norms of rows that do not fill a vector, and of their sums with a residual."""
    generator = torch.Generator().manual_seed(0)
    x, residual, (weight, bias) = (torch.randn((rows, 603), generator=generator).add(1).to(dtype) for rows in (3, 3, 2))
    biases, total, sums = bias if centered else None, x + residual, x.clone()
    got = [native_norm(x, None, weight, biases, _EPS), native_norm(sums, residual, weight, biases, _EPS)]
    wide = None if biases is None else biases.float()
    expected = TorchOps().norm(torch.stack((x, total)).float(), weight.float(), wide, _EPS)
    return sums.equal(total) and _is_close(torch.stack(got), expected, dtype)


def _is_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCE[dtype]
    return torch.allclose(got.float(), expected, rtol=tolerance, atol=tolerance)
