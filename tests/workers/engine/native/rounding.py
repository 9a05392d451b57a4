"""Plain torch with the rounding of the CPU kernels."""

from torch import Tensor

from workers.engine.layers.base import Projection
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import Weight
from workers.engine.native.packed import as_integers


class RoundingOps(TorchOps):
    """Takes integers as they are stored, and makes floats of them for each product, whose inputs
    are rounded as the kernels round them.
    """

    def multiplies(self, bits: int | None, dtype: object) -> bool:
        return bits is not None

    def product(self, weight: Weight, bias: Tensor | None) -> Projection:
        plain = super().product(weight, bias)
        if isinstance(weight, Tensor):
            return plain
        return lambda x: plain(as_integers(x, weight.group_size).to(x.dtype))
