"""Wrap another backend's operations to use int8 for every matrix."""

from __future__ import annotations

from torch import Tensor

from workers.engine.layers.base import Ops, Projection, Table
from workers.engine.layers.quantized import Weight, quantize
from workers.engine.layers.stored_matrix import StoredMatrix


class Int8Ops:
    """Quantize each plain matrix to int8, and delegate everything else to `ops`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.stack, self.norm, self.add_norm, self.norm_in_place = ops.stack, ops.norm, ops.add_norm, ops.norm_in_place
        self.multiplies, self.multiplies_float8 = ops.multiplies, ops.multiplies_float8

    def linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str | None = None) -> Projection:
        return self._ops.linear(_quantized(weight), bias, activation)

    def gated_linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str) -> Projection:
        return self._ops.gated_linear(_quantized(weight), bias, activation)

    def table(self, weight: Weight | StoredMatrix) -> Table:
        return self._ops.table(_quantized(weight))


def _quantized(weight: Weight | StoredMatrix) -> Weight | StoredMatrix:
    if isinstance(weight, StoredMatrix):
        return weight.mapped(quantize) if isinstance(weight.form, Tensor) else weight
    return quantize(weight) if isinstance(weight, Tensor) else weight
