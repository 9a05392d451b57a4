"""Matrices of a checkpoint whose rows are read in slices, so that a layer can pack or quantize them
without a whole plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.quantized import QuantizedWeight, Weight, have_one_kind, stack_rows

_NUMBERS_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [n, k] of a checkpoint; `read` returns a slice of its rows on the device."""

    form: Weight  # has its shape and kind, and no numbers
    read: Callable[[slice], Weight]
    exact: torch.dtype | None = None  # a dtype of 16 bits that holds each number, if one is known

    @property
    def shape(self) -> torch.Size:
        return self.form.shape

    def whole(self) -> Weight:
        return self.read(slice(0, self.shape[0]))

    def mapped(self, change: Callable[[Tensor], Weight]) -> StoredMatrix:
        """Return the plain matrix with `change` applied to slices of its rows."""
        assert isinstance(self.form, Tensor)

        def read(where: slice) -> Weight:
            parts = list(slices(where, self.shape[1])) or [where]
            return _joined([change(self.plain(part)) for part in parts])

        return StoredMatrix(without_numbers(change(self.form[:1]), self.shape), read)

    def padded(self, missing: int) -> StoredMatrix:
        """Return the plain matrix with `missing` rows of zeros at its end."""
        rows, columns = self.shape

        def read(where: slice) -> Weight:
            found = self.plain(slice(min(where.start, rows), min(where.stop, rows)))
            return F.pad(found, (0, 0, 0, where.stop - where.start - len(found)))

        return StoredMatrix(without_numbers(self.form, (rows + missing, columns)), read, self.exact)

    def plain(self, where: slice) -> Tensor:
        """Return some rows of a plain matrix."""
        rows = self.read(where)
        assert isinstance(rows, Tensor)
        return rows


def slices(where: slice, columns: int, multiple: int = _ROWS_AT_ONCE) -> Iterator[slice]:
    """Yield consecutive parts of some rows, each a multiple of `multiple` rows; the last may be
    cut off.
    """
    step = max(1, _NUMBERS_AT_ONCE // max(1, columns) // multiple) * multiple
    for first in range(where.start, where.stop, step):
        yield slice(first, min(first + step, where.stop))


def rows_of(weight: Weight | StoredMatrix, where: slice) -> Weight:
    """Return a slice of the rows of a matrix."""
    if isinstance(weight, StoredMatrix):
        return weight.read(where)
    return weight[where] if isinstance(weight, Tensor) else weight.rows(where)


def whole(weight: Weight | StoredMatrix) -> Weight:
    return weight.whole() if isinstance(weight, StoredMatrix) else weight


def form_of(weight: Weight | StoredMatrix) -> Weight:
    """Return a weight of the same kind and shape, whose numbers must not be read."""
    return weight.form if isinstance(weight, StoredMatrix) else weight


def without_numbers(weight: Weight, shape: Sequence[int]) -> Weight:
    """Return a weight of that shape that takes no memory for numbers."""
    if isinstance(weight, Tensor):
        return torch.empty((), dtype=weight.dtype).expand(tuple(shape))
    return replace(weight, values=torch.empty((), dtype=weight.values.dtype).expand(tuple(shape)))


def stack_stored(parts: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Return the rows of all quantized matrices as one; None if their kinds differ."""
    forms = [part.form for part in parts]
    kinds = [form for form in forms if isinstance(form, QuantizedWeight)]
    if len(kinds) < len(forms) or not have_one_kind(kinds):
        return None
    if len(parts) == 1:
        return parts[0]
    lengths = [part.shape[0] for part in parts]

    def read(where: slice) -> Weight:
        found = list(parts_within(where, lengths)) or [(0, slice(0, 0))]
        return _joined([parts[index].read(within) for index, within in found])

    return StoredMatrix(without_numbers(kinds[0], (sum(lengths), parts[0].shape[1])), read)


def parts_within(where: slice, lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the index of each part that has some of the rows, and those rows within it."""
    start = 0
    for index, length in enumerate(lengths):
        first, end = max(where.start, start), min(where.stop, start + length)
        if first < end:
            yield index, slice(first - start, end - start)
        start += length


def _joined(parts: Sequence[Weight]) -> Weight:
    """Return the rows of quantized weights of one kind as one weight."""
    if len(parts) == 1:
        return parts[0]
    stacked = stack_rows([part for part in parts if isinstance(part, QuantizedWeight)])
    assert stacked is not None
    return stacked
