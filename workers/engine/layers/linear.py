"""Load projections. Those with the same input are fused; all are sharded over the ranks of a model
(see `parallel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.activation import XIELU
from workers.engine.layers.base import Projection
from workers.engine.layers.heads import Rows
from workers.engine.layers.parallel import Parallel, Shard
from workers.engine.layers.stored_matrix import StoredMatrix
from workers.engine.layers.weights import Weights


class RowParallel:
    """A projection x [..., in] -> [..., out] in which each rank has a part of x and of the weight's
    columns; the ranks' outputs are summed.
    """

    __slots__ = ("_own", "_parallel")

    def __init__(self, own: Projection, parallel: Parallel) -> None:
        self._own, self._parallel = own, parallel

    def __call__(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(self._own(x))


def load_fused(
    weights: Weights,
    names: Sequence[str],
    size_in: int,
    sizes_out: Sequence[Rows],
    bias: bool,
    transposed: bool = False,
    activation: str | None = None,
) -> Projection:
    """Return several projections of one input as a single one; each rank has some rows of each.

    The outputs are concatenated in the order of `names`. GPT-2's weights are `transposed`: stored
    as [in, out].
    """
    return weights.ops.linear(*_take_fused(weights, names, size_in, sizes_out, bias, transposed), activation)


def load_gated(
    weights: Weights, gate: str, up: str, size_in: int, size_out: Shard, bias: bool, activation: str
) -> Projection:
    """Return a projection that multiplies the activation of `gate` by `up`.

    Equal names stand for one tensor with the gate's rows first.
    """
    rows = [size_out.within(part, 2) if gate == up else size_out for part in range(2)]
    return weights.ops.gated_linear(*_take_fused(weights, [gate, up], size_in, rows, bias), activation)


def load_xielu(weights: Weights, up: str, activation: str, size_in: int, size_out: Shard, bias: bool) -> Projection:
    """Return the projection `up` with an xIELU, whose factors are among the tensors of
    `activation`.
    """
    plain = load_fused(weights, [up], size_in, [size_out], bias)
    alpha_p, alpha_n = (weights.take(f"{activation}.{factor}", (1,)) for factor in ("alpha_p", "alpha_n"))
    activate = XIELU(alpha_p, alpha_n)
    return lambda x: activate(plain(x))


def load_row_parallel(
    weights: Weights, name: str, size_in: Shard, size_out: int, bias: bool, transposed: bool = False
) -> Projection:
    """Return the projection of the output of `load_fused` or `load_gated`, with the same
    sharding.
    """
    weight, parallel = weights.take_matrix_columns(f"{name}.weight", size_out, size_in, transposed), weights.parallel
    biases = weights.take(f"{name}.bias", (size_out,)) if bias else None
    own = weights.ops.linear(weight, biases if parallel.rank == 0 else None)
    return own if parallel.size == 1 else RowParallel(own, parallel)


def _take_fused(
    weights: Weights,
    names: Sequence[str],
    size_in: int,
    sizes_out: Sequence[Rows],
    bias: bool,
    transposed: bool = False,
) -> tuple[StoredMatrix, Tensor | None]:
    weight = weights.take_matrix([f"{name}.weight" for name in names], sizes_out, size_in, transposed)
    return weight, weights.take_rows([f"{name}.bias" for name in names], sizes_out) if bias else None
