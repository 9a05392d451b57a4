"""Weight matrices in the order in which the processor multiplies them (`source/packed.c`).

The plain matrices are not kept.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.quantized import GROUP_MULTIPLES, QuantizedWeight, Weight, quantize, stack_rows
from workers.engine.layers.stored_matrix import StoredMatrix, form_of, rows_of, slices
from workers.engine.native.library import load
from workers.engine.native.memory import huge_zeros, release_freed

logger = logging.getLogger(__name__)

PANEL = 32
# With the numbers of matmul.h; each uint8 has two numbers of 4 bits
_STORED = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)
_INTEGERS = {8: torch.int8, 4: torch.uint8}
# Rows of integers are padded to a multiple of this many numbers
_AT_ONCE = {dtype: GROUP_MULTIPLES[bits] for bits, dtype in _INTEGERS.items()}
_QUAD_BLOCK = 128  # numbers of a row per scale if integers are multiplied in quads (matmul_quads.h)
_IN_NEITHER = 3  # `find_misfits` of numbers that neither bf16 nor float16 holds exactly
_NAMES = {torch.int8: "int8", torch.uint8: "int4"}
_LARGE = 1 << 20  # bytes
_MANY = 101  # rows; on every processor too many for the kernels of few rows (matmul.c)
# With the numbers of activation.h
ACTIVATIONS = dict.fromkeys(("silu", "swish"), 1) | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), 2)
ACTIVATIONS |= {"gelu": 3, "relu": 4, "relu2": 5, "quick_gelu": 6}


class _Matrix(ctypes.Structure):
    """`packed_matrix` of matmul.h."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_ssize_t),
        ("k", ctypes.c_ssize_t),
        ("group", ctypes.c_ssize_t),
        *((name, ctypes.c_int) for name in ("stored", "activation", "gated", "floats", "to_float")),
    ]


def can_pack(weight: Weight) -> bool:
    """Return whether this processor can multiply a packed matrix of that dtype, row length and
    groups; kernels take at least two numbers of a row at a time.

    Raises NativeUnavailable.
    """
    size_in = weight.shape[1]
    if not isinstance(weight, QuantizedWeight):
        return size_in > 0 and size_in % 2 == 0 and _matches_torch(weight.dtype)
    even = size_in > 0 and size_in % 2 == 0
    return even and weight.has_whole_groups and multiplies_integers(weight.bits, weight.dtype)


def multiplies_integers(bits: int, dtype: torch.dtype) -> bool:
    """Return whether this processor multiplies inputs in a dtype with integers of `bits` bits.

    Raises NativeUnavailable.
    """
    return _matches_torch(dtype, _INTEGERS[bits])


class PackedMatrix:
    """Computes x [..., k] -> activation(x weight.T + bias) [..., n].

    The result has the dtype of weight [n, k] and bias [n], float32 or bfloat16; it is float32 if
    `to_float`. Weights in float32 are stored in 16 bits if all of them are exact there. Quantized
    weights are stored as they are; x is then multiplied as integers, too (`as_integers`). If
    `gated`, the first n / 2 rows of weight are gates, the other rows are up, and the result [...,
    n / 2] is activation(gate) * up.
    """

    __slots__ = (
        "_bias",
        "_dtype",
        "_matrix",
        "_multiply",
        "_panels",
        "_scales",
        "_size_in",
        "_zeros",
        "columns",
        "dtype",
        "pointer",
    )

    def __init__(
        self,
        weight: Weight | StoredMatrix,
        bias: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        to_float: bool = False,
    ) -> None:
        form = form_of(weight)
        n, self._size_in = form.shape
        self.dtype, floats = form.dtype, form.dtype == torch.float32
        self.columns, self._dtype = (n // 2 if gated else n), torch.float32 if to_float else form.dtype
        self._scales: Tensor | None = None
        self._zeros: Tensor | None = None
        group = self._size_in
        if isinstance(form, QuantizedWeight):
            self._panels, self._scales, self._zeros = _pack_quantized(weight, gated)
            group = min(group, form.group_size)
        else:
            self._panels = _pack_plain(weight, gated)
        self._bias = None if bias is None else _pack(bias.float()[:, None], gated)
        number = ACTIVATIONS[activation] if activation else 0
        parts = (self._panels, self._scales, self._zeros, self._bias)
        self._matrix = _Matrix(
            *(None if part is None else part.data_ptr() for part in parts),
            n,
            self._size_in,
            group,
            *(_STORED.index(self.stored), number, gated, floats, to_float or floats),
        )
        self.pointer = ctypes.addressof(self._matrix)
        self._multiply = _functions().packed_matmul
        if self._panels.nbytes >= _LARGE:
            release_freed()

    @property
    def stored(self) -> torch.dtype:
        """Return the dtype of the stored weights; uint8 stands for numbers of 4 bits."""
        return self._panels.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self._size_in or x.dtype != self.dtype:
            raise ValueError(f"{x.dtype} {list(x.shape)} where rows of {self._size_in} {self.dtype} are multiplied")
        x = x.contiguous()
        rows = x.numel() // self._size_in
        y = torch.empty((*x.shape[:-1], self.columns), dtype=self._dtype)
        if self._multiply(self.pointer, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads()):
            raise MemoryError(f"a product of {rows} rows with a matrix of integers")
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [R, k] of the weight by int64 indices [R] below n, like an embedding table.

        Not valid for a gated matrix.
        """
        y = torch.empty((len(indices), self._size_in), dtype=self.dtype)
        threads = torch.get_num_threads()
        _functions().packed_lookup(self.pointer, indices.data_ptr(), len(indices), y.data_ptr(), threads)
        return y


def as_integers(x: Tensor, group_size: int) -> Tensor:
    """Return x [..., k] in float64, rounded as for a product with integers in groups.

    It is rounded to 16 bits by a scale for each row, or, if the processor adds four products at
    once, to 8 bits by a scale for each part of a group.
    """
    if not _functions().multiplies_quads():
        return _rounded(x, 32767)
    k, groups = x.shape[-1], range(0, x.shape[-1], group_size)
    starts = [start for first in groups for start in range(first, min(first + group_size, k), _QUAD_BLOCK)]
    return torch.cat([_rounded(block, 127) for block in x.tensor_split(starts[1:], -1)], -1)


def _rounded(x: Tensor, largest: int) -> Tensor:
    """Round each row to multiples of 1 / `largest` of its largest number."""
    most = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    steps = torch.full_like(most, largest) / most  # with a number as the dividend, torch would round twice
    return (x.float() * steps).round().double() * most.double() / largest


def _stored_dtype(weight: Tensor | StoredMatrix) -> torch.dtype:
    """Return the smallest dtype that holds each number of a plain weight exactly."""
    dtype = form_of(weight).dtype
    if dtype != torch.float32:
        return dtype
    if isinstance(weight, StoredMatrix) and weight.exact == torch.bfloat16:
        return weight.exact
    misfits = 0
    for where in slices(slice(0, weight.shape[0]), weight.shape[1]):
        rows = _plain_rows(weight, where)
        misfits |= _functions().find_misfits(rows.data_ptr(), rows.numel(), torch.get_num_threads())
        if misfits == _IN_NEITHER:
            break
    return torch.bfloat16 if not misfits & 1 else torch.float16 if not misfits & 2 else torch.float32


def _plain_rows(weight: Weight | StoredMatrix, where: slice) -> Tensor:
    rows = rows_of(weight, where)
    assert isinstance(rows, Tensor)
    return rows.contiguous()


def _pack_plain(weight: Weight | StoredMatrix, gated: bool) -> Tensor:
    """Return the panels of a plain matrix."""
    assert not isinstance(weight, QuantizedWeight)
    stored = _stored_dtype(weight)
    panels = _new_panels(weight.shape, stored, gated)
    for where, rows in _parts_to_pack(weight.shape, gated):
        parts = [_plain_rows(weight, part) for part in rows]
        _fill(panels, where, torch.cat(parts).to(stored) if gated else parts[0].to(stored), gated)
    return panels


def _pack_quantized(weight: Weight | StoredMatrix, gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the panels of a quantized matrix's values, scales and zero points."""
    form = form_of(weight)
    assert isinstance(form, QuantizedWeight)
    lines = (form.shape[0], form.scales.shape[1])
    panels = _new_panels(form.shape, form.values.dtype, gated)
    scales = _new_panels(lines, torch.float32, gated)
    zeros = None if form.zeros is None else _new_panels(lines, torch.float32, gated, kept=False)
    for where, rows in _parts_to_pack(form.shape, gated):
        part = _quantized_rows(weight, rows)
        _fill(panels, where, part.values, gated)
        _fill(scales, where, part.scales, gated)
        if zeros is not None and part.zeros is not None:
            _fill(zeros, where, part.zeros.float(), gated)
    return panels, scales, None if zeros is None else zeros.to(torch.uint8)


def _quantized_rows(weight: Weight | StoredMatrix, parts: Sequence[slice]) -> QuantizedWeight:
    found = [rows for part in parts if isinstance(rows := rows_of(weight, part), QuantizedWeight)]
    stacked = found[0] if len(found) == 1 else stack_rows(found)
    assert stacked is not None
    return stacked


def _parts_to_pack(shape: Sequence[int], gated: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield consecutive panels of a matrix [n, k] with the slices of rows that they hold."""
    n, k = shape
    half, per_panel = n // 2, PANEL // 2 if gated else PANEL
    for part in slices(slice(0, half if gated else n), 2 * k if gated else k, per_panel):
        panels = slice(part.start // per_panel, -(-part.stop // per_panel))
        yield panels, [part, slice(half + part.start, half + part.stop)] if gated else [part]


def _pack(weight: Tensor, gated: bool) -> Tensor:
    """Return the panels of a small matrix [n, k]."""
    panels = _new_panels(weight.shape, weight.dtype, gated)
    _fill(panels, slice(0, len(panels)), weight, gated)
    return panels


def _new_panels(shape: Sequence[int], dtype: torch.dtype, gated: bool, kept: bool = True) -> Tensor:
    """Return zeroed panels for a matrix [n, k] in its stored dtype; if `kept`, in huge pages."""
    n, k = shape
    count = -(-(n // 2) // (PANEL // 2)) if gated else -(-n // PANEL)
    at_once = _AT_ONCE.get(dtype, 1)
    depth = -(-k // at_once) * at_once // (2 if dtype == torch.uint8 else 1)
    return (huge_zeros if kept else torch.zeros)((count, depth, PANEL), dtype=dtype)


def _fill(panels: Tensor, where: slice, rows: Tensor, gated: bool) -> None:
    """Write the rows of some panels; if `gated`, the first half of them are gates."""
    rows = rows.contiguous()
    stored, threads = _STORED.index(rows.dtype), torch.get_num_threads()
    _functions().pack_rows(rows.data_ptr(), *rows.shape, stored, gated, panels[where].data_ptr(), threads)


@functools.cache
def _matches_torch(dtype: torch.dtype, values: torch.dtype | None = None) -> bool:
    """Return whether products in `dtype` equal torch's.

    `values` is the dtype of quantized weights, None for plain ones. The kernels may not have been
    tested on a processor with the same instructions.
    """
    if dtype == torch.bfloat16 and values is None and not _functions().multiplies_bf16():
        return False
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    stored = (values,) if values is not None else _STORED[:1] if dtype == torch.bfloat16 else _STORED[:3]
    right = all(_kernel_matches(dtype, narrow) for narrow in stored)
    if not right:
        name = str(dtype).removeprefix("torch.") if values is None else _NAMES[values]
        logger.warning(
            "CPU kernels: products in %s differ from torch's here; torch's are used, which may be slower", name
        )
    return right


def _kernel_matches(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether products equal torch's; turn AMX off if only its products differ."""
    if _product_matches(dtype, stored):
        return True
    has_tiles = stored in _AT_ONCE or dtype == torch.bfloat16
    if not has_tiles or not _functions().use_tiles(_STORED.index(stored), False):
        return False
    right = _product_matches(dtype, stored)
    if right:
        logger.warning("CPU kernels: products by AMX differ from torch's here; those by AVX-512 are used")
    return right


def _product_matches(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Compare products of few and of many rows.

    There are more outputs than in a panel and more inputs than DEPTH; 600 inputs do not fill tiles
    of AMX, 640 do.
    """
    return all(_equals_sums(dtype, stored, inputs) for inputs in (600, 640))


def _equals_sums(dtype: torch.dtype, stored: torch.dtype, inputs: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes, floats = ((_MANY, inputs), (44, inputs), (44,)), torch.bfloat16 if stored in _AT_ONCE else stored
    x, plain, bias = (torch.randn(shape, generator=generator).to(floats).to(dtype) for shape in shapes)
    weight: Weight = plain
    multiplied = x.double()
    if stored in _AT_ONCE:
        weight = quantize(plain) if stored == torch.int8 else _example(plain)
        plain = replace(weight, dtype=torch.float64).dequantize()
        multiplied = as_integers(multiplied, weight.group_size)
    gate, up = F.linear(multiplied, plain.double(), bias.double()).chunk(2, -1)
    expected, matrix = gate.relu() * up, PackedMatrix(weight, bias, "relu", gated=True, to_float=True)
    return all(
        torch.allclose(matrix(x[:rows]).double(), expected[:rows], rtol=1e-4, atol=1e-2) for rows in (1, 3, _MANY)
    )


def _example(plain: Tensor) -> QuantizedWeight:
    """Return a matrix of 4 bits of that shape, in groups of 64 columns; the last may be cut off."""
    values, zeros = ((part * 7 + 8).clamp_(0, 15).to(torch.uint8) for part in (plain, plain[:, :10]))
    return QuantizedWeight(values, plain[:, 10:20].float() / 16, plain.dtype, 64, zeros)


@functools.cache
def _functions() -> ctypes.CDLL:
    library, pointer, size = load(), ctypes.c_void_p, ctypes.c_ssize_t
    library.find_misfits.argtypes = (pointer, size, size)
    library.pack_rows.argtypes = (pointer, size, size, ctypes.c_int, ctypes.c_int, pointer, size)
    library.packed_matmul.argtypes = (pointer, pointer, size, pointer, size)
    library.packed_lookup.argtypes = (pointer, pointer, size, pointer, size)
    library.use_tiles.argtypes = (ctypes.c_int, ctypes.c_int)
    for stored in (torch.bfloat16, *_AT_ONCE):
        library.use_tiles(_STORED.index(stored), True)
    for function in (library.pack_rows, library.packed_lookup):
        function.restype = None
    return library
