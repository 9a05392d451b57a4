"""Norms by `source/norm.c`."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from workers.engine.layers.base import HeadNorm
from workers.engine.native.library import load


class NormWeights(ctypes.Structure):
    """`norm_weights` of kernels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("wide", "by_head", "last")),
    ]


def norm_weights(weight: Tensor, bias: Tensor | None, eps: float) -> NormWeights:
    """Return a norm in the kernels' form; the tensors must outlive it."""
    address, wide = None if bias is None else bias.data_ptr(), weight.dtype == torch.float32
    return NormWeights(weight.data_ptr(), address, eps, wide, weight.dim() > 1)


def head_norm(norm: HeadNorm | None, last: bool) -> NormWeights:
    """Return the norm of heads in the kernels' form, `last` if heads are turned first; it must
    outlive the result.
    """
    if norm is None:
        return NormWeights()
    weights = norm_weights(norm.weight, norm.bias, norm.eps)
    weights.last = last
    return weights


def native_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Add `residual` in place to contiguous x [..., size] and return the norm of the sum.

    With a bias it is a layer norm, which also subtracts the mean. All are in float32 or all in
    bfloat16, but the weight may be in float32. Raises NativeUnavailable.
    """
    y, size = torch.empty_like(x), x.shape[-1]
    norm = ctypes.byref(norm_weights(weight, bias, eps))
    pointers = x.data_ptr(), None if residual is None else residual.data_ptr(), norm, y.data_ptr()
    _norm_rows()(*pointers, x.numel() // size, size, size, x.dtype == torch.float32, torch.get_num_threads())
    return y


@functools.cache
def _norm_rows() -> ctypes._FuncPointer:
    function, pointer, size = load().norm_rows, ctypes.c_void_p, ctypes.c_ssize_t
    function.argtypes = (*(pointer,) * 4, *(size,) * 3, ctypes.c_int, size)
    function.restype = None
    return function
