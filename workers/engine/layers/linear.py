"""Projections, with those that read the same input run as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from workers.engine.weights import Weights


class Linear:
    """x [..., in] -> [..., out]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def load_linear(weights: Weights, name: str, size_in: int, size_out: int, bias: bool) -> Linear:
    return load_fused(weights, [name], size_in, [size_out], bias)


def load_fused(weights: Weights, names: Sequence[str], size_in: int, sizes_out: Sequence[int], bias: bool) -> Linear:
    """Several projections of one input as a single one; their outputs stand side by side in the order of `names`."""
    weight = weights.take_rows([f"{name}.weight" for name in names], sizes_out, size_in)
    return Linear(weight, weights.take_rows([f"{name}.bias" for name in names], sizes_out, None) if bias else None)


def load_transposed(weights: Weights, name: str, size_in: int, size_out: int) -> Linear:
    """GPT-2 keeps its projections as [in, out]."""
    return Linear(weights.take(f"{name}.weight", (size_in, size_out), transpose=True), weights.take(f"{name}.bias", (size_out,)))
