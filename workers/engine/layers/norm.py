"""Normalize over the last dimension, optionally fused with the preceding addition in a decoder."""

from __future__ import annotations

from torch import Tensor

from workers.engine.layers.weights import Weights


class RMSNorm:
    """Root-mean-square norm whose factor is `offset` plus the checkpoint's weight.

    A sum is kept in float32, since `1 + weight` is not exact in 16 bits.
    """

    def __init__(self, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        weight = weights.take(f"{name}.weight", (size,))
        self.weight = weight.float() + offset if offset else weight
        self.bias: Tensor | None = None
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments may be overwritten."""
        return self._ops.add_norm(x, residual, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """Layer norm: RMS norm with mean subtraction and a bias, which is zero if the checkpoint has
    none.
    """

    def __init__(
        self, weights: Weights, name: str, size: int, eps: float, bias: bool = True, offset: float = 0.0
    ) -> None:
        super().__init__(weights, name, size, eps, offset)
        self.bias = weights.take(f"{name}.bias", (size,)) if bias else self.weight.new_zeros(size, dtype=weights.dtype)
