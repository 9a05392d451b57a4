"""Normalizations over the last dimension, each also as one with the addition that precedes it
in a decoder.
"""

from __future__ import annotations

from torch import Tensor

from workers.engine.layers.weights import Weights


class RMSNorm:
    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments are used up."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """With weight and bias."""

    __slots__ = ("_ops", "bias", "eps", "weight")

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.bias = weights.take(f"{name}.bias", (size,))
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments are used up."""
        return self._ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
