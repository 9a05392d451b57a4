"""The layers' arithmetic in C; `layers.base` has the interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.layers.base import DecoderLayer, Norm, Projection, Stack, Table
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import Weight
from workers.engine.layers.stack import LayerStack
from workers.engine.native.library import load
from workers.engine.native.packed import ACTIVATIONS, PackedMatrix, can_pack, multiplies_integers
from workers.engine.native.stack import NativeStack, can_stack


class NativeOps(TorchOps):
    """Products run from packed weights where there are kernels for the dtype, else they stay
    torch's.
    """

    def linear(self, weight: Weight, bias: Tensor | None, activation: str | None = None) -> Projection:
        if _can_pack(weight, activation):
            return PackedMatrix(weight, bias, activation)
        return super().linear(weight, bias, activation)

    def gated_linear(self, weight: Weight, bias: Tensor | None, activation: str) -> Projection:
        if _can_pack(weight, activation):
            return PackedMatrix(weight, bias, activation, gated=True)
        return super().gated_linear(weight, bias, activation)

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        return bits is not None and multiplies_integers(bits, dtype)

    def table(self, weight: Weight) -> Table:
        return PackedTable(weight) if _can_pack(weight) else super().table(weight)

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        post_norm: bool = False,
    ) -> Stack:
        kind = NativeStack if can_stack(layers, norm, post_norm) else LayerStack
        return kind(layers, norm, heads, kv_heads, head_dim, post_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return _normed(x.contiguous(), None, weight, bias, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _normed(x, residual, weight, bias, eps), x


class PackedTable:
    """Rows and logits from one packed copy."""

    def __init__(self, weight: Weight) -> None:
        self._matrix = PackedMatrix(weight, to_float=True)

    def rows(self, indices: Tensor) -> Tensor:
        return self._matrix.rows(indices)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._matrix(hidden)


def _can_pack(weight: Weight, activation: str | None = None) -> bool:
    return can_pack(weight) and (activation is None or activation in ACTIVATIONS)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [..., size], after `residual` has been added to it in place; with a bias
    it is one that takes off the mean too.
    """
    y = torch.empty_like(x)
    added, biases = (None if given is None else given.data_ptr() for given in (residual, bias))
    rows, size, floats = x.numel() // x.shape[-1], x.shape[-1], x.dtype == torch.float32
    _norm_rows()(
        x.data_ptr(), added, weight.data_ptr(), biases, y.data_ptr(), rows, size, eps, bias is not None, floats
    )
    return y


@functools.cache
def _norm_rows() -> ctypes._FuncPointer:
    function, pointer, size = load().norm_rows, ctypes.c_void_p, ctypes.c_ssize_t
    function.argtypes = (
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        size,
        size,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_int,
    )
    function.restype = None
    return function
