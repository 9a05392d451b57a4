"""Norms of queries' and keys' heads, of each kind that a model has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.engine.layers.base import HeadNorm
from workers.engine.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm
from workers.engine.layers.parallel import Shard
from workers.engine.layers.weights import Weights

KINDS = ["none", "rms", "offset", "layer", "by head", "after rotation"]


def head_norms(
    kind: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[HeadNorm | None]:
    """Return the queries' norm and the keys'."""
    if kind == "none":
        return [None, None]

    offset = float(kind == "offset")

    def reader(*shape: int) -> Callable[[], Tensor]:
        return lambda: torch.rand(shape) + 0.5 - offset

    if kind == "by head":
        counts = dict(zip("qk", (heads, kv_heads), strict=True))
        weights = Weights({f"{name}.weight": reader(count, dim) for name, count in counts.items()}, dtype, device)
        return [HeadLayerNorm(weights, name, Shard(0, count, count), dim, 1e-6) for name, count in counts.items()]
    weights = Weights({f"{name}.{part}": reader(dim) for name in "qk" for part in ("weight", "bias")}, dtype, device)
    if kind == "layer":
        return [LayerNorm(weights, name, dim, 1e-6) for name in "qk"]
    return [RMSNorm(weights, name, dim, 1e-6, offset) for name in "qk"]
