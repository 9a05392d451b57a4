"""The layers' arithmetic that a device may fuse, behind one interface; `make_ops` picks it by the attention backend's name."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.activation import activation


class Ops(Protocol):
    """Norms go over the last dimension and sum in float32. A sum of `x` and `residual` is rounded to their dtype before it is normed."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich, 2019) of x [..., size]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual itself. Neither argument is of use afterwards."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm (Ba et al., 2016) of x [..., size]."""
        ...

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual itself. Neither argument is of use afterwards."""
        ...

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        """[T, 2 * width] -> [T, width]: the activation `name` of the first half times the second. Raises ModelLoadError as `activation`."""
        ...


class TorchOps:
    """Plain torch, for every device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.layer_norm(total, weight, bias, eps), total

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(name)(gate).mul_(up)


def make_ops(backend: str) -> Ops:
    """Those that go with an attention backend."""
    if backend == "triton":
        from workers.engine.kernels.ops import TritonOps

        return TritonOps()
    return TorchOps()
