"""Products with weights of 4 and 8 bits, converted to floats in registers: y = x weight.T + bias.

The weight is the left operand of the matrix instruction, which may come from registers, and the
rows of x are the right one. Four numbers of 4 bits, or two of 8, are in an element of 16 bits: a
tile of elements holds the columns of one tile in its lowest bits and those of the next tiles in the
bits above. So each tile of numbers is multiplied as it is, and two elements of a register become
two floats at once. Groups' scales are applied to sums in float32, so that no weight is rounded.

Few rows are limited by memory bandwidth. If there are fewer programs than the GPU runs at once,
several programs share the columns of a tile, and a second kernel adds up their sums in a fixed
order.

Many rows are limited by the matrix units, which torch's products use better. From
`DEQUANTIZED_ROWS` on, the weight is dequantized once for all rows of a step, into a buffer for some
outputs at a time.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from workers.engine.kernels.product_check import fault_of
from workers.engine.kernels.tuning import TileChoice
from workers.engine.layers.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

DEQUANTIZED_ROWS = 384
"""Least rows for torch's product: on an H100 it is then about as fast as the kernel, with 4 and
with 8 bits.
"""
_BUFFER = 1 << 27  # numbers that are dequantized at once
_DEQUANTIZED_OUTPUTS = 64  # outputs of a program
_ROWS, _INPUTS, _OUTPUTS = (1, 20, 80), 144, 80  # sizes of the example for the comparison
_BLOCK_K = 32  # elements of a tile's row at most
_LEAST_K = 16  # least of a matrix instruction
_MOST_PARTS = 16
_LEAST_TILES = 4  # tiles of one part
_PROGRAMS_EACH = 2  # programs per multiprocessor
_INTERPRETED_PROGRAMS = 8
_SUMMED = 1024  # outputs of a program that adds up parts
_PRECISION = tl.constexpr("tf32x3")  # of float32, as in attention
# Four bits of two elements become the last bits of two floats whose exponent makes their unit 1.
# The float of 0 is subtracted with the zero point. After Kim et al., 2022: "Who Says Elephants
# Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production".
_FROM_4_BITS = """{{
    .reg .b32 shifted, one;
    shr.b32 shifted, $1, {shift};
    lop3.b32 $0, shifted, 0x000F000F, {float_of_0}, 0xEA;
    {add}
}}"""
_ADD_BF16, _ADD_FP16 = "mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $0, one, $2;", "add.rn.f16x2 $0, $0, $2;"
_4_BITS_TO_BF16, _4_BITS_TO_FP16 = (
    tl.constexpr([_FROM_4_BITS.format(shift=shift, float_of_0=float_of_0, add=add) for shift in (0, 4, 8, 12)])
    for float_of_0, add in (("0x43004300", _ADD_BF16), ("0x64006400", _ADD_FP16))
)
_0_IN_BF16, _0_IN_FP16 = tl.constexpr(128.0), tl.constexpr(1024.0)

# One byte of two elements: sign, exponent and mantissa move to their places in a wider float, and a
# product corrects the exponent's bias.
_FROM_E4M3 = """{{
    .reg .b32 sign, number, scale, zero;
    {sign}.b32 sign, $1, {sign_shift};
    and.b32 sign, sign, 0x80008000;
    {move}.b32 number, $1, {shift};
    and.b32 number, number, {mask};
    or.b32 number, number, sign;
    mov.b32 scale, {scale};
    mov.b32 zero, 0x80008000;
    fma.rn.{floats} $0, number, scale, zero;
}}"""
_E4M3_TO_BF16, _E4M3_TO_FP16 = (
    tl.constexpr(
        [
            _FROM_E4M3.format(
                sign="shl", sign_shift=8 - 8 * byte, move=move, shift=shift, mask=mask, scale=scale, floats=floats
            )
            for byte, (move, shift) in enumerate(moves)
        ]
    )
    for moves, mask, scale, floats in (
        ((("shl", 4), ("shr", 4)), "0x07F007F0", "0x7B807B80", "bf16x2"),  # 2^120
        ((("shl", 7), ("shr", 1)), "0x3F803F80", "0x5C005C00", "f16x2"),  # 2^8
    )
)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Return whether the kernel takes a weight's groups as they are."""
    return weight.scales.shape[1] == 1 or weight.group_size % _LEAST_K == 0


@functools.cache
def matches_torch(device: torch.device, dtype: torch.dtype, values: torch.dtype, group_size: int) -> bool:
    """Return whether products in `dtype` with `values` of a type equal torch's.

    A group size of 0 is one group.
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
    """Return a program's rows of x (`block_m`) and outputs (`tile`) for `rows` rows.

    The choices were measured on an H100.
    """
    if dtype == torch.float32:  # three products instead of one need registers
        return TileChoice(16, 64, 4, 3)
    if rows > 32:
        return TileChoice(64 if rows <= 64 else 128, 128, 8, 3)
    return TileChoice(max(16, triton.next_power_of_2(rows)), 128, 4, 4)


class QuantizedMatmul:
    """Computes x [..., k] -> [..., n] in the dtype of x, for weights accepted by `can_multiply`."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._n, self._k = weight.shape
        self._group_size = weight.group_size if weight.scales.shape[1] > 1 else 0
        self._block_k = block_k(self._group_size, weight.bits)
        self._bits, self._bias = weight.bits, bias
        self._is_float8 = weight.is_float8
        self._values = pack(weight.values.view(torch.uint8), weight.bits, self._block_k)
        self._scales = weight.scales.t().contiguous()  # [groups, n]
        self._zeros = None if weight.zeros is None else weight.zeros.t().float().contiguous()
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
            self._group_size, self._is_float8, self._bits,
            choice.block_m, choice.tile, self._block_k, _uses_ptx(x.dtype),
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
        """Dequantize the outputs from `first` on; only the last block may be cut off."""
        width = self._values.shape[1]
        _dequantize[(triton.cdiv(len(out), _DEQUANTIZED_OUTPUTS), triton.cdiv(width, self._block_k))](
            self._values, self._scales, self._zeros, out, first, self._n, self._k, width,
            self._group_size, self._is_float8, self._bits, _DEQUANTIZED_OUTPUTS, self._block_k, num_warps=4,
        )  # fmt: skip

    def _split(self, programs: int) -> tuple[int, int]:
        """Return the tiles of columns per part, and the number of parts."""
        count = triton.cdiv(self._values.shape[1], self._block_k)
        parts = min(self._programs // programs, count // _LEAST_TILES, _MOST_PARTS)
        each = triton.cdiv(count, max(1, parts))
        return each, triton.cdiv(count, each)


def pack(values: Tensor, bits: int, elements: int) -> Tensor:
    """Pack numbers, uint8 [n, k], into int16 elements [n, k * bits / 16].

    k is padded to whole tiles of `elements`. The lowest bits of a tile's elements hold its first
    columns, the next bits the next columns.
    """
    numbers = 16 // bits
    filled = torch.nn.functional.pad(values, (0, -values.shape[1] % (numbers * elements)))
    packed = torch.zeros((len(values), filled.shape[1] // numbers), dtype=torch.int16, device=values.device)
    for number, part in enumerate(filled.unflatten(1, (-1, numbers, elements)).unbind(2)):
        packed |= part.flatten(1).to(torch.int16) << bits * number
    return packed


def block_k(group_size: int, bits: int) -> int:
    """Return the elements of a tile's row.

    Numbers at the same place in the elements are of one group; all numbers of the tile are, if
    possible.
    """
    power = group_size & -group_size or _BLOCK_K * 16 // bits
    return max(_LEAST_K, min(_BLOCK_K, power * bits // 16))


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_EACH * torch.cuda.get_device_properties(device).multi_processor_count


def _uses_ptx(dtype: torch.dtype) -> bool:
    """Return whether PTX converts numbers of 4 bits to floats; the interpreter cannot run it."""
    return dtype != torch.float32 and not knobs.runtime.interpret


@triton.jit(do_not_specialize=["rows", "each"])
def _multiply(
    x, values, scales, zeros, bias, out, rows, n, k, width, each,
    GROUP: tl.constexpr, FLOAT8: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows and outputs.

    `width` is the elements of a row of the weight, `each` the tiles of columns of a part. A GROUP
    of 0 is the whole row. Without `bias` there may be several parts with separate sums.
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
    NUMBERS: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = BLOCK_K * NUMBERS  # of a tile
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, tl.cdiv(width, BLOCK_K))
    scale = _group(scales, first * COLUMNS, n, k, output, has_output, GROUP)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(first, last):
        element = tile * BLOCK_K + column
        packed = tl.load(
            values + output[:, None] * width + element[None, :], has_output[:, None] & (element < width)[None, :], 0
        )
        # The next tile's scale, so that its load overlaps this tile's products
        next_scale = _group(scales, (tile + 1) * COLUMNS, n, k, output, has_output, GROUP) if GROUP > 0 else scale
        zero = 0.0 if zeros is None else _group(zeros, tile * COLUMNS, n, k, output, has_output, GROUP)
        products = sums if GROUP == 0 else tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for number in tl.static_range(NUMBERS):
            start = tile * COLUMNS + number * BLOCK_K
            inputs = _inputs(x, start, k, row, has_row, BLOCK_K)
            if GROUP % COLUMNS != 0:  # each number has its own group
                zero = 0.0 if zeros is None else _group(zeros, start, n, k, output, has_output, GROUP)
                factors = _factors(packed, number, zero, inputs, FLOAT8, BITS, PTX)
                scale = _group(scales, start, n, k, output, has_output, GROUP)
                sums += tl.dot(factors, inputs, input_precision=_PRECISION) * scale[:, None]
            else:
                factors = _factors(packed, number, zero, inputs, FLOAT8, BITS, PTX)
                products = tl.dot(factors, inputs, products, input_precision=_PRECISION)
        if GROUP == 0:
            sums = products
        elif GROUP % COLUMNS == 0:
            sums += products * scale[:, None]
        scale = next_scale
    if GROUP == 0:
        sums *= scale[:, None]
    if bias is not None:
        sums += tl.load(bias + first_output + output, has_output, 0.0).to(tl.float32)[:, None]
    out += tl.program_id(2).to(tl.int64) * rows * n + first_row * n + first_output
    tl.store(
        out + row[None, :] * n + output[:, None], sums.to(out.dtype.element_ty), has_output[:, None] & has_row[None, :]
    )


@triton.jit
def _inputs(x, start, k, row, has_row, BLOCK_K: tl.constexpr):
    column = start + tl.arange(0, BLOCK_K)
    return tl.load(x + row[None, :] * k + column[:, None], (column < k)[:, None] & has_row[None, :], 0.0)


@triton.jit
def _group(of_groups, start, n, k, output, has_output, GROUP: tl.constexpr):
    """Return the scales or zero points of the columns from `start` on, all of one group."""
    return tl.load(of_groups + _group_number(start, k, GROUP) * n + output, has_output, 0.0)


@triton.jit
def _group_number(start, k, GROUP: tl.constexpr):
    """Return the group of a tile's columns; a tile after the last column has the last group."""
    return tl.minimum(start, k - 1) // GROUP if GROUP else 0


@triton.jit
def _factors(packed, number: tl.constexpr, zero, inputs, FLOAT8: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Return one number of each element minus `zero` [BLOCK_N], in the dtype of `inputs`."""
    bf16: tl.constexpr = inputs.dtype == tl.bfloat16
    if PTX and BITS == 4:
        less = (-(_0_IN_BF16 if bf16 else _0_IN_FP16) - zero).to(inputs.dtype)[:, None]
        found = tl.inline_asm_elementwise(
            _4_BITS_TO_BF16[number] if bf16 else _4_BITS_TO_FP16[number],
            "=r,r,r", [packed, less], inputs.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX and FLOAT8:
        found = tl.inline_asm_elementwise(
            _E4M3_TO_BF16[number] if bf16 else _E4M3_TO_FP16[number],
            "=r,r", [packed], inputs.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = _numbers(packed, number, inputs.dtype, FLOAT8, BITS)
        if BITS == 4:
            found -= zero.to(inputs.dtype)[:, None]
    return found


@triton.jit
def _numbers(packed, number: tl.constexpr, dtype: tl.constexpr, FLOAT8: tl.constexpr, BITS: tl.constexpr):
    """Return one number of each element as a float."""
    if BITS == 4:
        found = (packed >> (4 * number) & 15).to(dtype)
    elif FLOAT8:
        found = (packed >> (8 * number)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        found = (packed >> (8 * number)).to(tl.int8).to(dtype)
    return found


@triton.jit(do_not_specialize=["first"])
def _dequantize(
    values, scales, zeros, out, first, n, k, width,
    GROUP: tl.constexpr, FLOAT8: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    output, tile = first + row, tl.program_id(1)
    has_output = output < n
    element = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    packed = tl.load(
        values + output[:, None] * width + element[None, :], has_output[:, None] & (element < width)[None, :], 0
    )
    out += row[:, None] * k
    NUMBERS: tl.constexpr = 16 // BITS
    for number in tl.static_range(NUMBERS):
        numbers = _numbers(packed, number, tl.float32, FLOAT8, BITS)
        start = (tile * NUMBERS + number) * BLOCK_K
        _scale(numbers, scales, zeros, out, start, n, k, output, has_output, GROUP, BLOCK_K)


@triton.jit
def _scale(
    numbers, scales, zeros, out, start, n, k, output, has_output, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Write the columns from `start` on, all of one group, rounded once."""
    column = start + tl.arange(0, BLOCK_K)
    group = _group_number(start, k, GROUP)
    if zeros is not None:
        numbers -= tl.load(zeros + group * n + output, has_output, 0).to(tl.float32)[:, None]
    scaled = numbers * tl.load(scales + group * n + output, has_output, 0.0)[:, None]
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
