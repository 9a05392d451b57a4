"""Provide activations by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.messages.errors import ModelLoadError

Activation = Callable[[Tensor], Tensor]

_gelu_tanh: Activation = partial(F.gelu, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x).mul_(x)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu_squared,
    "quick_gelu": _quick_gelu,
}


def activation(name: str) -> Activation:
    """Return the activation. Raise ModelLoadError for an unknown name."""
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"config.json asks for the activation {name!r}; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


class XIELU:
    """xIELU (Huang and Schlag, 2024), which learns two factors for each layer, in float32."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> None:
        """Take both factors as checkpoints have them: [1], before a softplus."""
        self._above, self._below = F.softplus(alpha_p.float()), F.softplus(alpha_n.float()) + beta
        self._beta, self._eps = beta, eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        below = (torch.expm1(wide.clamp(max=self._eps)) - wide) * self._below
        return torch.where(wide > 0, self._above * wide * wide, below).add_(wide, alpha=self._beta).to(x.dtype)
