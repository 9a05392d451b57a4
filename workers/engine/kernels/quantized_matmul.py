"""Products with weights of 4 and 8 bits, which become floats in registers: y = x weight.T + bias.

The weight is the left operand of the matrix instruction, which may come from registers, and the
rows of x are the right one. Numbers of 4 bits lie two in a byte: a tile of bytes holds the columns
of one tile in its lower halves and those of the next tile in its upper ones, so that each half is
multiplied as it is. Groups' scales are applied to sums in float32, so that no weight is rounded.

Few rows live on bytes of weights under way: where there are fewer programs than the GPU runs at
once, several share the columns of a tile, and a second kernel adds up their sums in a fixed order.

Many rows live on matrix units, which torch's products keep busier: from `DEQUANTIZED_ROWS` on, the
weight is dequantized once for all rows of a step, some outputs after the others, into a buffer.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.product_check import fault_of
from workers.engine.kernels.tuning import TileChoice
from workers.engine.layers.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

DEQUANTIZED_ROWS = 1024
"""Fewest rows whose product is torch's. Dequantizing moves about 5 bytes a weight, which takes a
GPU as long as products of some hundred rows; not measured yet.
"""
_BUFFER = 1 << 27  # numbers that are dequantized at once
_DEQUANTIZED_OUTPUTS = 64  # of a program
_ROWS, _INPUTS, _OUTPUTS = (1, 20, 80), 144, 80  # of the example that is compared
_BLOCK_K = 64  # columns of a tile at most
_LEAST_K = 16  # that a matrix instruction takes
_MOST_PARTS = 16
_LEAST_TILES = 4  # of one part
_PROGRAMS_EACH = 2  # of a multiprocessor
_INTERPRETED_PROGRAMS = 8
_SUMMED = 1024  # outputs of a program that adds up parts
_PRECISION = tl.constexpr("tf32x3")  # of float32, as in attention


def can_multiply(weight: QuantizedWeight) -> bool:
    """Return whether the kernel takes a weight's groups as they are."""
    return weight.scales.shape[1] == 1 or weight.group_size % _LEAST_K == 0


@functools.cache
def matches_torch(device: torch.device, dtype: torch.dtype, values: torch.dtype, group_size: int) -> bool:
    """Return whether products with values of a type come out right in `dtype`; a group size of 0 is
    one group.
    """
    generator = torch.Generator().manual_seed(0)
    size = group_size or _INPUTS
    columns = 2 * size if group_size else size
    shape, groups = (_OUTPUTS, columns), (_OUTPUTS, columns // size)
    zeros = None
    if values == torch.uint8:
        zeros = torch.randint(0, 16, groups, generator=generator, dtype=values)
        numbers = torch.randint(0, 16, shape, generator=generator, dtype=values)
    else:
        numbers = torch.randint(-8, 9, shape, generator=generator).to(values)
    scales = torch.rand(groups, generator=generator) + 0.5
    x = torch.randint(-14, 15, (sum(_ROWS), columns), generator=generator).float()
    if fault := fault_of(QuantizedMatmul, QuantizedWeight(numbers, scales, dtype, size, zeros), x, _ROWS, device):
        logger.warning(
            "the kernel for quantized weights is not used on %s in %s (%s): they are stored dequantized, which takes"
            " more memory",
            device,
            str(dtype).removeprefix("torch."),
            fault,
        )
    return not fault


def tiles(rows: int, dtype: torch.dtype) -> TileChoice:
    """Return the rows of x (`block_m`) and outputs (`tile`) of a program for so many rows in a
    dtype.
    """
    if dtype == torch.float32:  # three products for one take registers
        return TileChoice(16, 64, 4, 3)
    if rows > 64:
        return TileChoice(128, 128, 8, 3)
    return TileChoice(max(16, triton.next_power_of_2(rows)), 64, 4, 4)


class QuantizedMatmul:
    """x [..., k] -> [..., n] in the dtype of x, for a weight that `can_multiply` is true of."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._n, self._k = weight.shape
        self._group_size = weight.group_size if weight.scales.shape[1] > 1 else 0
        self._block_k = min(_BLOCK_K, self._group_size & -self._group_size or _BLOCK_K)
        self._bits, self._bias = weight.bits, bias
        self._values = (pack(weight.values, self._block_k) if weight.bits == 4 else weight.values).contiguous()
        self._scales = weight.scales.t().contiguous()  # [groups, n]
        self._zeros = None if weight.zeros is None else weight.zeros.t().contiguous()
        self._programs = _programs(weight.values.device)

    def __call__(self, x: Tensor) -> Tensor:
        inputs = x.reshape(-1, self._k).contiguous()
        rows = len(inputs)
        out = torch.empty((rows, self._n), dtype=x.dtype, device=x.device)
        if rows >= DEQUANTIZED_ROWS:
            self._multiply_dequantized(inputs, out)
        elif rows:
            self._multiply(inputs, out, rows)
        return out.view(*x.shape[:-1], self._n)

    def _multiply(self, x: Tensor, out: Tensor, rows: int) -> None:
        choice = tiles(rows, x.dtype)
        columns, blocks = triton.cdiv(self._n, choice.tile), triton.cdiv(rows, choice.block_m)
        each, parts = self._split(columns * blocks)
        sums = out if parts == 1 else torch.empty((parts, rows, self._n), dtype=torch.float32, device=x.device)
        _multiply[(columns, blocks, parts)](
            x, self._values, self._scales, self._zeros, self._bias if parts == 1 else None, sums,
            rows, self._n, self._k, self._values.shape[1], each,
            self._group_size, self._bits, choice.block_m, choice.tile, self._block_k,
            num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip
        if parts > 1:
            _add_parts[(rows, triton.cdiv(self._n, _SUMMED))](
                sums, self._bias, out, rows, self._n, parts, _SUMMED, num_warps=4
            )

    def _multiply_dequantized(self, x: Tensor, out: Tensor) -> None:
        each = max(1, _BUFFER // self._k // _DEQUANTIZED_OUTPUTS) * _DEQUANTIZED_OUTPUTS
        buffer = torch.empty((min(each, self._n), self._k), dtype=x.dtype, device=x.device)
        for first in range(0, self._n, each):
            weight, sums = buffer[: self._n - first], out[:, first : first + each]
            self._dequantize(first, weight)
            if self._bias is None:
                torch.mm(x, weight.t(), out=sums)
            else:
                torch.addmm(self._bias[first : first + each], x, weight.t(), out=sums)

    def _dequantize(self, first: int, out: Tensor) -> None:
        """Write the outputs from `first` on; a block of them may only be cut off by the last."""
        width = self._values.shape[1]
        _dequantize[(triton.cdiv(len(out), _DEQUANTIZED_OUTPUTS), triton.cdiv(width, self._block_k))](
            self._values, self._scales, self._zeros, out, first, self._n, self._k, width,
            self._group_size, self._bits, _DEQUANTIZED_OUTPUTS, self._block_k, num_warps=4,
        )  # fmt: skip

    def _split(self, programs: int) -> tuple[int, int]:
        """Return the tiles of columns of a part, and the parts."""
        count = triton.cdiv(self._values.shape[1], self._block_k)
        parts = min(self._programs // programs, count // _LEAST_TILES, _MOST_PARTS)
        each = triton.cdiv(count, max(1, parts))
        return each, triton.cdiv(count, each)


def pack(values: Tensor, block_k: int) -> Tensor:
    """Return numbers of 4 bits, uint8 [n, k], two in a byte: [n, k / 2], where k is filled up to a
    multiple of two tiles of columns.
    """
    filled = torch.nn.functional.pad(values, (0, -values.shape[1] % (2 * block_k)))
    low, high = filled.unflatten(1, (-1, 2, block_k)).unbind(2)
    return torch.flatten(low | high << 4, 1)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_EACH * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["rows", "each"])
def _multiply(
    x, values, scales, zeros, bias, out, rows, n, k, width, each,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`width`: bytes of a row of the weight; `each`: tiles of columns of a part; a GROUP of 0 is
    the whole row. Without `bias` there may be parts, each with sums of its own.
    """
    first_output, first_row = tl.program_id(0).to(tl.int64) * BLOCK_N, tl.program_id(1).to(tl.int64) * BLOCK_M
    output, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    has_output, has_row = first_output + output < n, first_row + row < rows
    scales += first_output
    if zeros is not None:
        zeros += first_output
    values += first_output * width
    x += first_row * k
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * each
    for tile in range(first, tl.minimum(first + each, tl.cdiv(width, BLOCK_K))):
        byte = tile * BLOCK_K + column
        numbers = tl.load(
            values + output[:, None] * width + byte[None, :], has_output[:, None] & (byte < width)[None, :], 0.0
        )
        if BITS == 4:
            start = tile * 2 * BLOCK_K
            sums = _add(
                sums, numbers & 15, x, scales, zeros, start, n, k, output, row, has_output, has_row, GROUP, BLOCK_K
            )
            sums = _add(
                sums, numbers >> 4, x, scales, zeros, start + BLOCK_K, n, k, output, row, has_output, has_row,
                GROUP, BLOCK_K,
            )  # fmt: skip
        else:
            start = tile * BLOCK_K
            sums = _add(sums, numbers, x, scales, zeros, start, n, k, output, row, has_output, has_row, GROUP, BLOCK_K)
    if GROUP == 0:
        sums *= tl.load(scales + output, has_output, 0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + first_output + output, has_output, 0.0).to(tl.float32)[:, None]
    out += tl.program_id(2).to(tl.int64) * rows * n + first_row * n + first_output
    tl.store(
        out + row[None, :] * n + output[:, None], sums.to(out.dtype.element_ty), has_output[:, None] & has_row[None, :]
    )


@triton.jit
def _add(
    sums, numbers, x, scales, zeros, start, n, k, output, row, has_output, has_row,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the products of the columns from `start` on, which are of one group."""
    column = start + tl.arange(0, BLOCK_K)
    inputs = tl.load(x + row[None, :] * k + column[:, None], (column < k)[:, None] & has_row[None, :], 0.0)
    group = _group(start, k, GROUP)
    numbers = _less_zeros(numbers, zeros, group, n, output, has_output).to(inputs.dtype)
    if GROUP == 0:
        return tl.dot(numbers, inputs, sums, input_precision=_PRECISION)
    scale = tl.load(scales + group * n + output, has_output, 0.0)
    return sums + tl.dot(numbers, inputs, input_precision=_PRECISION) * scale[:, None]


@triton.jit
def _group(start, k, GROUP: tl.constexpr):
    """Return the group of a tile's columns; one behind the last column has the last group's."""
    return tl.minimum(start, k - 1) // GROUP if GROUP else 0


@triton.jit
def _less_zeros(numbers, zeros, group, n, output, has_output):
    if zeros is not None:
        zero = tl.load(zeros + group * n + output, has_output, 0)
        numbers = numbers.to(tl.int8) - zero.to(tl.int8)[:, None]
    return numbers


@triton.jit(do_not_specialize=["first"])
def _dequantize(
    values, scales, zeros, out, first, n, k, width,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    output, tile = first + row, tl.program_id(1)
    has_output = output < n
    byte = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    numbers = tl.load(
        values + output[:, None] * width + byte[None, :], has_output[:, None] & (byte < width)[None, :], 0.0
    )
    out += row[:, None] * k
    if BITS == 4:
        start = tile * 2 * BLOCK_K
        _scale(numbers & 15, scales, zeros, out, start, n, k, output, has_output, GROUP, BLOCK_K)
        _scale(numbers >> 4, scales, zeros, out, start + BLOCK_K, n, k, output, has_output, GROUP, BLOCK_K)
    else:
        _scale(numbers, scales, zeros, out, tile * BLOCK_K, n, k, output, has_output, GROUP, BLOCK_K)


@triton.jit
def _scale(
    numbers, scales, zeros, out, start, n, k, output, has_output, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Write the columns from `start` on, which are of one group, rounded once."""
    column = start + tl.arange(0, BLOCK_K)
    group = _group(start, k, GROUP)
    scale = tl.load(scales + group * n + output, has_output, 0.0)
    scaled = _less_zeros(numbers, zeros, group, n, output, has_output).to(tl.float32) * scale[:, None]
    tl.store(out + column[None, :], scaled.to(out.dtype.element_ty), has_output[:, None] & (column < k)[None, :])


@triton.jit(do_not_specialize=["rows", "parts"])
def _add_parts(sums, bias, out, rows, n, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = output < n
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * rows + row) * n + output, mask, 0.0)
    if bias is not None:
        total += tl.load(bias + output, mask, 0.0).to(tl.float32)
    tl.store(out + row * n + output, total.to(out.dtype.element_ty), mask)
