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
_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def activation(name: str) -> Activation:
    """Return the activation. Raise ModelLoadError for an unknown name."""
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"config.json asks for the activation {name!r}; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]
