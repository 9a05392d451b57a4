"""Products with weights in float8 by torch's `_scaled_mm`, which multiplies them with inputs in
float8: y = x weight.T + bias. The rows of x are rounded by a scale for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.layers.quantized import QuantizedWeight

_MULTIPLE = 16  # of both sizes of the weight
_LARGEST = 448.0  # of e4m3
_TINY = 1e-30  # of the largest number of a row
_SCALES_ROWS_SINCE = (9, 0)  # compute capability


def can_scale(weight: QuantizedWeight) -> bool:
    """Return whether `_scaled_mm` takes a weight in float8 as it is."""
    return weight.scales.shape[1] == 1 and not any(size % _MULTIPLE for size in weight.shape)


class ScaledMatmul:
    """x [..., k] -> [..., n] in the dtype of x, for a weight that `can_scale` is true of."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._n, self._k = weight.shape
        self._weight = weight.values.contiguous().t()  # the second operand has to be column-major
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
    """Return whether `_scaled_mm` takes a scale for each row and output, which it does for results
    in bfloat16.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _SCALES_ROWS_SINCE


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous x [rows, k] in float8_e4m3fn, and the scale of each row, float32 [rows, 1],
    by which its largest number becomes the largest of the type.
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
