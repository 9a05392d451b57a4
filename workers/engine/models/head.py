"""Load projections after the pooling: few rows, in float32 regardless of the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.activation import activation as function_of
from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}


def load_dense(
    weights: Weights, name: str, size_in: int, size_out: int, *, bias: bool = True, activation: str | None = None
) -> Projection:
    """Return x -> activation(x weight.T + bias). Raises ModelLoadError."""
    weight = weights.take(f"{name}.weight", (size_out, size_in)).float()
    biases = weights.take(f"{name}.bias", (size_out,)).float() if bias else None
    if activation is None:
        return lambda x: F.linear(x, weight, biases)
    function = _FUNCTIONS.get(activation) or function_of(activation)
    return lambda x: function(F.linear(x, weight, biases))


def load_norm(weights: Weights, name: str, size: int, eps: float, *, bias: bool) -> Projection:
    """Return x -> its layer norm. Raises ModelLoadError."""
    weight = weights.take(f"{name}.weight", (size,)).float()
    biases = weights.take(f"{name}.bias", (size,)).float() if bias else None
    return lambda x: F.layer_norm(x, (size,), weight, biases, eps)
