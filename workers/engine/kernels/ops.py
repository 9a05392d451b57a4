"""The layers' arithmetic by kernels of our own; `layers.base` has the interface."""

from __future__ import annotations

from torch import Tensor

from workers.engine.kernels.activation import silu_times_up
from workers.engine.kernels.norm import add_normed, normed
from workers.engine.layers.ops import TorchOps


class TritonOps(TorchOps):
    """Activations other than SiLU stay torch's."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return normed(x, weight, bias, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_normed(x, residual, weight, bias, eps)

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        return silu_times_up(gate_up) if name in ("silu", "swish") else super().gated_activation(name, gate_up)
