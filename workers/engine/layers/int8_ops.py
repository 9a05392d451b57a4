"""Another backend's arithmetic with every matrix in int8."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.base import DecoderLayer, Norm, Ops, Projection, Stack, Table
from workers.engine.layers.quantized import Weight, quantize


class Int8Ops:
    """Quantizes each matrix that it is given, and leaves the rest to `ops`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, weight: Weight, bias: Tensor | None, activation: str | None = None) -> Projection:
        return self._ops.linear(_quantized(weight), bias, activation)

    def gated_linear(self, weight: Weight, bias: Tensor | None, activation: str) -> Projection:
        return self._ops.gated_linear(_quantized(weight), bias, activation)

    def table(self, weight: Weight) -> Table:
        return self._ops.table(_quantized(weight))

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        post_norm: bool = False,
    ) -> Stack:
        return self._ops.stack(layers, norm, heads, kv_heads, head_dim, post_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._ops.norm(x, weight, bias, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._ops.add_norm(x, residual, weight, bias, eps)


def _quantized(weight: Weight) -> Weight:
    return quantize(weight) if isinstance(weight, Tensor) else weight
