"""Normalizations over the last dimension, each also as one with the addition that precedes it
in a decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.layers.weights import Weights


class RMSNorm:
    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.bias: Tensor | None = None
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments are used up."""
        return self._ops.add_norm(x, residual, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """The same without the mean, and with a bias; of zeros where the checkpoint has none."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, bias: bool = True) -> None:
        super().__init__(weights, name, size, eps)
        self.bias = weights.take(f"{name}.bias", (size,)) if bias else torch.zeros_like(self.weight)
