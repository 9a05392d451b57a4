"""Normalisations over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from workers.engine.weights import Weights


class RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich, 2019); sums in float32."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class LayerNorm:
    """Layer norm with weight and bias (Ba et al., 2016)."""

    __slots__ = ("bias", "eps", "shape", "weight")

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.bias = weights.take(f"{name}.bias", (size,))
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
