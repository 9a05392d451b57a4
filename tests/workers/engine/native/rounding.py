"""Plain torch with the rounding of the CPU kernels."""

from torch import Tensor

from workers.engine.layers.base import Projection, Table
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import Weight
from workers.engine.native.packed import as_integers


class RoundingOps(TorchOps):
    """Takes integers as they are stored, and makes floats of them for each product, whose inputs
    are rounded as the kernels round them.
    """

    def multiplies(self, bits: int | None, dtype: object) -> bool:
        return bits is not None

    def linear(self, weight: Weight, bias: Tensor | None, activation: str | None = None) -> Projection:
        return _with_rounded_inputs(super().linear(weight, bias, activation), weight)

    def gated_linear(self, weight: Weight, bias: Tensor | None, activation: str) -> Projection:
        return _with_rounded_inputs(super().gated_linear(weight, bias, activation), weight)

    def table(self, weight: Weight) -> Table:
        return _RoundingTable(super().table(weight), weight)


class _RoundingTable:
    def __init__(self, table: Table, weight: Weight) -> None:
        self.rows, self.logits = table.rows, _with_rounded_inputs(table.logits, weight)


def _with_rounded_inputs(product: Projection, weight: Weight) -> Projection:
    if isinstance(weight, Tensor):
        return product
    return lambda x: product(as_integers(x, weight.group_size).to(x.dtype))
