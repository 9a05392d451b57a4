"""Products with weights in float8 by torch's `_scaled_mm`: y = x weight.T + bias.

It multiplies them with inputs in float8: each row of x is rounded by its own scale.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.product_check import fault_of
from workers.engine.layers.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

_MULTIPLE = 16  # both sizes of the weight are multiples of it
_LARGEST = 448.0  # largest number of e4m3
_TINY = 1e-30  # least value for the largest number of a row
_SCALES_ROWS_SINCE = (9, 0)  # compute capability
_ROWS, _INPUTS, _OUTPUTS = (1, 19), 144, 48  # sizes of the example for the comparison


def can_scale(weight: QuantizedWeight) -> bool:
    """Return whether inputs may be in float8, too, and `_scaled_mm` accepts the weight."""
    shape_fits = weight.scales.shape[1] == 1 and not any(size % _MULTIPLE for size in weight.shape)
    return weight.is_float8 and weight.float8_inputs and shape_fits


@functools.cache
def matches_torch(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products in `dtype` equal those with the dequantized weight.

    `_scaled_mm` is not a public function, and differs by GPU and by version of torch.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-14, 15, (sum(_ROWS), _INPUTS), generator=generator).float()
    x[:, 0] = _LARGEST
    x /= torch.arange(len(x)).remainder(4).float().exp2()[:, None]  # float8 holds them exactly
    values = torch.randn((_OUTPUTS, _INPUTS), generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand((_OUTPUTS, 1), generator=generator) + 0.5
    weight = QuantizedWeight(values, scales, dtype, _INPUTS)
    if fault := fault_of(ScaledMatmul, weight, x, _ROWS, device):
        logger.warning(
            "torch._scaled_mm is not used on %s in %s (%s): weights in fp8 are multiplied with inputs as they are,"
            " which may be slower",
            device,
            str(dtype).removeprefix("torch."),
            fault,
        )
    return not fault


class ScaledMatmul:
    """Computes x [..., k] -> [..., n] in the dtype of x, for weights accepted by `can_scale`."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._n, self._k = weight.shape
        self._weight = weight.values.contiguous().t()  # the second operand must be column-major
        self._scales = weight.scales.reshape(1, -1).contiguous()
        self._bias = bias
        self._one = torch.ones(1, dtype=torch.float32, device=self._weight.device)
        self._scales_rows = weight.dtype == torch.bfloat16 and _scales_rows(self._weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        inputs = x.reshape(-1, self._k).contiguous()
        if not len(inputs):
            return x.new_empty((*x.shape[:-1], self._n))
        values, scales = quantize_rows(inputs)
        if self._scales_rows:
            y = torch._scaled_mm(values, self._weight, scales, self._scales, out_dtype=x.dtype)
        else:
            y = torch._scaled_mm(values, self._weight, self._one, self._one, out_dtype=torch.float32)
            y = y.mul_(scales).mul_(self._scales).to(x.dtype)
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self._n)


def _scales_rows(device: torch.device) -> bool:
    """Return whether `_scaled_mm` accepts a scale per row and per output; its results are then in
    bfloat16.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _SCALES_ROWS_SINCE


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous x [rows, k] in float8_e4m3fn, and the scale of each row, float32 [rows, 1].

    The scale maps a row's largest number to the largest of the type.
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(size)
    _quantize_rows[(rows,)](x, out, scales, size, width, _LARGEST, _TINY, num_warps=min(max(width // 512, 4), 16))
    return out, scales


@triton.jit
def _quantize_rows(x, out, scales, size, WIDTH: tl.constexpr, LARGEST: tl.constexpr, TINY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < size
    values = tl.load(x + row * size + column, mask, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), TINY) / LARGEST
    tl.store(scales + row, scale)
    tl.store(out + row * size + column, (values / scale).to(out.dtype.element_ty), mask)
