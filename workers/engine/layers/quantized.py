"""Represent weights with fewer bits than their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP_MULTIPLES = {8: 4, 4: 8}
"""Group sizes must be a multiple of this, by bits, unless a group is the whole row."""
_MAX = 127


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix [n, k] for inputs and outputs in `dtype`.

    Each number is (value - zero point) * scale, with the scale of its row and group of columns.
    There are three kinds: int8 and float8 without zero points, and 4-bit numbers with them.
    """

    values: Tensor  # int8 or float8_e4m3fn [n, k], or uint8 from 0 to 15
    scales: Tensor  # float32 [n, groups]
    dtype: torch.dtype
    group_size: int  # columns of a group; the last group may have fewer
    zeros: Tensor | None = None  # uint8 [n, groups] from 0 to 15
    float8_inputs: bool = False  # the checkpoint allows rounding of inputs to float8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def bits(self) -> int:
        return 8 if self.zeros is None else 4

    @property
    def has_whole_groups(self) -> bool:
        """Return whether products support its groups directly: one group, or `GROUP_MULTIPLES` of
        columns.
        """
        return self.scales.shape[1] == 1 or self.group_size % GROUP_MULTIPLES[self.bits] == 0

    @property
    def is_float8(self) -> bool:
        return self.values.dtype == torch.float8_e4m3fn

    def to(self, device: torch.device) -> QuantizedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros)

    def dequantize(self) -> Tensor:
        """Return the matrix in `dtype`."""
        numbers = self.values.float()
        if self.zeros is not None:
            numbers -= self._by_column(self.zeros)
        return numbers.mul_(self._by_column(self.scales)).to(self.dtype)

    def rows(self, indices: Tensor | slice) -> QuantizedWeight:
        """Return some of the rows, by int64 indices or as a slice."""
        zeros = None if self.zeros is None else self.zeros[indices]
        return replace(self, values=self.values[indices], scales=self.scales[indices], zeros=zeros)

    def columns(self, first: int, end: int) -> QuantizedWeight:
        """Return some of the columns, in smaller groups if `first` is inside a group."""
        if self.scales.shape[1] == 1:
            return replace(self, values=self.values[:, first:end])
        size = math.gcd(first, self.group_size)
        groups = slice(first // size, -(-end // size))
        scales, zeros = (
            None if part is None else part.repeat_interleave(self.group_size // size, 1)[:, groups]
            for part in (self.scales, self.zeros)
        )
        assert scales is not None
        return replace(self, values=self.values[:, first:end], scales=scales, zeros=zeros, group_size=size)

    def _by_column(self, by_group: Tensor) -> Tensor:
        if by_group.shape[1] == 1:
            return by_group
        return by_group.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


Weight = Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A quantized matrix whose numbers are unpacked in slices of rows."""

    form: QuantizedWeight  # the matrix, but its values must not be read
    unpack: Callable[[slice], Tensor]  # returns the values of some rows

    def rows(self, where: slice | Tensor) -> QuantizedWeight:
        """Return some of the rows, as a slice or by int64 indices."""
        if isinstance(where, slice):
            values = self.unpack(where)
        else:
            first, end = (int(where.min()), int(where.max()) + 1) if len(where) else (0, 0)
            values = self.unpack(slice(first, end))[where - first]
        return replace(self.form_of_rows(where), values=values)

    def form_of_rows(self, where: slice | Tensor) -> QuantizedWeight:
        """Return the form of some of the rows."""
        scales, zeros = (None if part is None else part[where] for part in (self.form.scales, self.form.zeros))
        assert scales is not None
        no_values = self.form.values[:1].expand(len(scales), -1)
        return replace(self.form, values=no_values, scales=scales, zeros=zeros)


def quantize(weight: Tensor) -> QuantizedWeight:
    """Return a matrix [n, k] in int8: each number is rounded to the nearest of 255 values, evenly
    spaced up to its row's largest magnitude.
    """
    largest = torch.linalg.vector_norm(weight, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scales = largest.clamp_(min=torch.finfo(torch.float32).tiny * _MAX).div_(_MAX)
    values = torch.div(weight, scales).round_().to(torch.int8)
    return QuantizedWeight(values, scales, weight.dtype, weight.shape[1])


def have_one_kind(weights: Sequence[QuantizedWeight]) -> bool:
    return len({(each.group_size, each.values.dtype, each.dtype, each.float8_inputs) for each in weights}) == 1


def stack_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return the rows of all weights as one, or None if their kinds differ."""
    if not have_one_kind(weights):
        return None
    first = weights[0]
    values, scales = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("values", "scales"))
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(first, values=values, scales=scales, zeros=torch.cat(zeros) if zeros else None)
