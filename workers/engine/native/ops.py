"""The layers' arithmetic in C; `layers.base` has the interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.layers.base import DecoderLayer, Norm, Projection, Stack, Table
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import Weight
from workers.engine.layers.stack import LayerStack
from workers.engine.layers.stored_matrix import StoredMatrix, form_of
from workers.engine.native.checks import norms_match_torch
from workers.engine.native.norms import native_norm
from workers.engine.native.packed import ACTIVATIONS, PackedMatrix, can_pack, multiplies_integers
from workers.engine.native.stack import NativeStack, can_stack


class NativeOps(TorchOps):
    """Products with packed weights, and norms, by the native kernels.

    Torch computes products in dtypes without kernels, and norms if the kernels' results differ.
    """

    def linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str | None = None) -> Projection:
        if _can_pack(weight, activation):
            return PackedMatrix(weight, bias, activation)
        return super().linear(weight, bias, activation)

    def gated_linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str) -> Projection:
        if _can_pack(weight, activation):
            return PackedMatrix(weight, bias, activation, gated=True)
        return super().gated_linear(weight, bias, activation)

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        return bits is not None and multiplies_integers(bits, dtype)

    def table(self, weight: Weight | StoredMatrix) -> Table:
        return PackedTable(weight) if _can_pack(weight) else super().table(weight)

    def stack(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> Stack:
        kind = NativeStack if can_stack(layers, norm, post_norm) else LayerStack
        return kind(layers, norm, post_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if not norms_match_torch(x.dtype):
            return super().norm(x, weight, bias, eps)
        return native_norm(x.contiguous(), None, weight, bias, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not norms_match_torch(x.dtype):
            return super().add_norm(x, residual, weight, bias, eps)
        return native_norm(x, residual, weight, bias, eps), x


class PackedTable:
    """An embedding table and output projection with one packed copy of the weight."""

    def __init__(self, weight: Weight | StoredMatrix) -> None:
        self._matrix = PackedMatrix(weight, to_float=True)

    def rows(self, indices: Tensor) -> Tensor:
        return self._matrix.rows(indices)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._matrix(hidden)


def _can_pack(weight: Weight | StoredMatrix, activation: str | None = None) -> bool:
    return can_pack(form_of(weight)) and (activation is None or activation in ACTIVATIONS)
