"""The layers' arithmetic by the engine's Triton kernels; `layers.base` has the interface."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from workers.engine.cuda.capability import has_float8
from workers.engine.kernels import quantized_matmul, scaled_matmul
from workers.engine.kernels.activation import silu_times_up
from workers.engine.kernels.norm import add_normed, norm_in_place, normed
from workers.engine.kernels.quantized_matmul import QuantizedMatmul, can_multiply
from workers.engine.kernels.scaled_matmul import ScaledMatmul, can_scale
from workers.engine.layers.base import Projection
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import Weight

logger = logging.getLogger(__name__)


class TritonOps(TorchOps):
    """Norms, SiLU and quantized products by Triton; torch computes all else."""

    def product(self, weight: Weight, bias: Tensor | None) -> Projection:
        if isinstance(weight, Tensor):
            return super().product(weight, bias)
        device, dtype = weight.values.device, weight.dtype
        if can_scale(weight) and scaled_matmul.matches_torch(device, dtype):
            return ScaledMatmul(weight, bias)
        if not can_multiply(weight):
            _log_dequantized(weight.group_size, dtype)
        elif quantized_matmul.matches_torch(
            device, dtype, weight.values.dtype, weight.group_size if weight.scales.shape[1] > 1 else 0
        ):
            return QuantizedMatmul(weight, bias)
        return super().product(weight.dequantize(), bias)

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        return bits is not None

    def multiplies_float8(self, device: torch.device) -> bool:
        return has_float8(device)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return normed(x, weight, bias, eps)

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        norm_in_place(x, weight, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_normed(x, residual, weight, bias, eps)

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        return silu_times_up(gate_up) if name in ("silu", "swish") else super().gated_activation(name, gate_up)


@functools.cache
def _log_dequantized(group_size: int, dtype: torch.dtype) -> None:
    logger.warning(
        "quantized weights in groups of %d columns are stored in %s, which takes more memory: kernels need groups of a"
        " multiple of 16 columns",
        group_size,
        str(dtype).removeprefix("torch."),
    )
