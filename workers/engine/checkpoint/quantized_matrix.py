"""A matrix stored in several tensors of a checkpoint: small numbers, scales and zero points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.layers.quantized import GROUP_MULTIPLES, QuantizedRows, QuantizedWeight
from workers.engine.messages.errors import ModelLoadError

Reader = Callable[[], Tensor]

WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)
# Each float8_e8m0fnu is a power of two
SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
_WORD_BITS = 32
_NIBBLE = 15
_NUMBERS_AT_ONCE = 1 << 21


class MatrixParts:
    """The tensors of one module by the last part of their names, such as `weight_scale`."""

    def __init__(self, module: str, readers: Mapping[str, Reader]) -> None:
        self.module = module
        self._readers = readers

    def __contains__(self, part: str) -> bool:
        return part in self._readers

    def require(self, names: Collection[str]) -> None:
        """Raise ModelLoadError if a part is absent."""
        for name in names:
            if name not in self._readers:
                raise ModelLoadError(
                    f"the checkpoint has no tensor {self.name_of(name)!r}, without which the quantized matrix"
                    f" {self.name_of('weight')!r} cannot be read"
                )

    def read(self, part: str, dtypes: Collection[torch.dtype], *shapes: Sequence[int | None]) -> Tensor:
        """Read a part, which must have one of the dtypes and one of the shapes (None: any size).

        Raises ModelLoadError.
        """
        tensor = self._readers[part]()
        if tensor.dtype not in dtypes:
            raise self.error(
                part, f"holds {_name(tensor.dtype)}, but quantization_config implies {_or(map(_name, dtypes))}"
            )
        if not any(_fits(tensor.shape, shape) for shape in shapes):
            raise self.error(
                part, f"has shape {list(tensor.shape)}, but its matrix implies {_or(map(_shape_name, shapes))}"
            )
        return tensor

    def groups(self, part: str, columns: int, groups: int) -> Tensor:
        """Return the group of each column, int64 [columns]. Raise ModelLoadError."""
        index = self.read(part, INDICES, (columns,)).long()
        if index.min() < 0 or index.max() >= groups:
            raise self.error(
                part, f"has groups from {index.min()} to {index.max()}, but the matrix has those from 0 to {groups - 1}"
            )
        return index

    def error(self, part: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"tensor {self.name_of(part)!r} {problem}")

    def name_of(self, part: str) -> str:
        return f"{self.module}.{part}" if self.module else part


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """The numbers [n, k] of a matrix, which `unpack` returns by rows."""

    shape: tuple[int, int]
    dtype: torch.dtype
    unpack: Callable[[slice], Tensor]

    @classmethod
    def plain(cls, values: Tensor) -> StoredNumbers:
        rows, columns = values.shape
        return cls((rows, columns), values.dtype, values.__getitem__)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [n, k]; each number is (value - zero point) * scale, by row and group."""

    values: StoredNumbers  # uint8, int8 or float8_e4m3fn
    scales: Tensor  # float32 [n, groups]
    zeros: Tensor | None = None  # float32 [n, groups]
    groups: Tensor | None = None  # int64 [k], the group of each column; None for a single group
    bits: int = 8

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the contiguous plain matrix, computed in float32 and rounded once to `dtype`."""
        rows, columns = self.values.shape
        plain = torch.empty((rows, columns), dtype=dtype, device=self.scales.device)
        if plain.is_meta:
            return plain
        step = max(1, _NUMBERS_AT_ONCE // max(1, columns))
        for part in (slice(first, min(first + step, rows)) for first in range(0, rows, step)):
            numbers = self.values.unpack(part).to(torch.float32)
            if self.zeros is not None:
                numbers -= self._by_column(self.zeros[part])
            numbers *= self._by_column(self.scales[part])
            plain[part] = numbers
        return plain

    def as_stored(self, dtype: torch.dtype) -> QuantizedRows | None:
        """Return a weight with the same integers, or None if weights do not support them.

        These are not supported: floats, columns that are not in the order of their groups, and 8
        bits with zero points.
        """
        size, unpack = self._group_size(), self.values.unpack
        if size is None or self.values.dtype not in (torch.int8, torch.uint8):
            return None
        if self.bits == 4 and self.values.dtype == torch.uint8:
            if self.zeros is None or not (self.zeros.is_meta or _fit_4_bits(self.zeros)):
                return None
            return self._rows(dtype, size, unpack, torch.uint8, zeros=self.zeros.to(torch.uint8))
        middle = 0 if self.values.dtype == torch.int8 else 128
        if self.zeros is not None and not (self.zeros.is_meta or bool((self.zeros == middle).all())):
            return None
        return self._rows(dtype, size, lambda where: (unpack(where) - middle).to(torch.int8), torch.int8)

    def as_float8(self, dtype: torch.dtype, float8_inputs: bool) -> QuantizedRows | None:
        """Return a weight with the same floats; None if groups are not in order."""
        size = self._group_size()
        if size is None:
            return None
        return self._rows(dtype, size, self.values.unpack, self.values.dtype, float8_inputs=float8_inputs)

    def _rows(
        self,
        dtype: torch.dtype,
        group_size: int,
        unpack: Callable[[slice], Tensor],
        stored: torch.dtype,
        zeros: Tensor | None = None,
        float8_inputs: bool = False,
    ) -> QuantizedRows:
        scales, no_values = self.scales.float().contiguous(), torch.empty((), dtype=stored).expand(self.values.shape)
        return QuantizedRows(QuantizedWeight(no_values, scales, dtype, group_size, zeros, float8_inputs), unpack)

    def _group_size(self) -> int | None:
        """Return the number of columns that share a scale; None if groups are not in order."""
        columns = self.values.shape[1]
        if self.groups is None:
            return columns
        size = int((self.groups == 0).sum())
        return size if size and self.groups.equal(torch.arange(columns) // size) else None

    def _by_column(self, by_group: Tensor) -> Tensor:
        return by_group if self.groups is None else by_group[:, self.groups]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The stored form of one matrix."""

    stored: str  # the part with its numbers
    required: tuple[str, ...]
    packed: int  # numbers in one element of that part
    read: Callable[[MatrixParts], QuantizedMatrix]
    bits: int | None = None  # of a number, if `QuantizedMatrix.as_stored` supports it
    float8: bool = False  # whether `QuantizedMatrix.as_float8` supports it
    float8_inputs: bool = False
    group_size: int | None = None  # columns that share a scale; None: all


def bits_as_stored(bits: int, group_size: int | None) -> int | None:
    """Return `MatrixLayout.bits` for integers in groups of `group_size` columns (None: rows)."""
    return bits if (group_size or 0) % GROUP_MULTIPLES[bits] == 0 else None


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [a, b] to uint8 [a, b * 32 / bits].

    Words hold unsigned numbers of 4 or 8 bits, the first in the lowest bits.
    """
    if packed.is_meta:  # operations on bits would import torch's compiler there
        return packed.new_empty((packed.shape[0], numbers_in(packed.shape[1], bits)), dtype=torch.uint8)
    # contiguous() would keep the strides of a single column; little-endian, as safetensors are
    octets = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & _NIBBLE, octets >> 4), dim=-1).flatten(-2)


def words(numbers: int, bits: int) -> int:
    """Return the number of int32 words that hold `numbers` numbers."""
    return -(-numbers * bits // _WORD_BITS)


def numbers_in(word_count: int, bits: int) -> int:
    """Return the number of numbers in `word_count` int32 words."""
    return word_count * _WORD_BITS // bits


def groups_in_order(columns: int, size: int) -> Tensor | None:
    """Return the group of each column for consecutive groups of `size` columns."""
    return None if size >= columns else torch.arange(columns) // size


def count_groups(columns: int, size: int) -> int:
    return -(-columns // size)


def _fit_4_bits(zeros: Tensor) -> bool:
    return zeros.to(torch.uint8).clamp_(max=15).equal(zeros)


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        size == other or other is None for size, other in zip(shape, expected, strict=True)
    )


def _shape_name(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _or(names: Collection[str] | map[str]) -> str:
    return " or ".join(names)
