"""Projections, with those that read the same input run as one, cut over the ranks that share a model (see `parallel.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from workers.engine.parallel import Parallel, Shard
from workers.engine.weights import Weights


class Linear:
    """x [..., in] -> [..., out]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallel:
    """x [..., in] -> [..., out], where each rank has a part of x and of the weight's columns: the ranks' outputs are summed."""

    __slots__ = ("_parallel", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> None:
        self.weight = weight  # [out, in / ranks]
        self.bias = bias if parallel.rank == 0 else None
        self._parallel = parallel

    def __call__(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(F.linear(x, self.weight, self.bias))


def load_fused(
    weights: Weights, names: Sequence[str], size_in: int, sizes_out: Sequence[Shard], bias: bool, transposed: bool = False
) -> Linear:
    """Several projections of one input as a single one, each rank with some rows of each; the outputs stand side by side in the order of
    `names`. GPT-2's are `transposed`: kept as [in, out]."""
    weight = weights.take_rows([f"{name}.weight" for name in names], sizes_out, size_in, transposed)
    return Linear(weight, weights.take_rows([f"{name}.bias" for name in names], sizes_out, None) if bias else None)


def load_row_parallel(weights: Weights, name: str, size_in: Shard, size_out: int, bias: bool, transposed: bool = False) -> RowParallel:
    """The projection of what came of `load_fused`, cut as that was."""
    weight = weights.take_columns(f"{name}.weight", size_out, size_in, transposed)
    return RowParallel(weight, weights.take(f"{name}.bias", (size_out,)) if bias else None, weights.parallel)
