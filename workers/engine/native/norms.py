"""Norms by `source/norm.c`."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from workers.engine.native.library import load


def native_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Add `residual` in place to contiguous x [..., size] and return the norm of the sum.

    With a bias it is a layer norm, which also subtracts the mean. All are in float32 or all in
    bfloat16. Raises NativeUnavailable.
    """
    y = torch.empty_like(x)
    added, biases = (None if given is None else given.data_ptr() for given in (residual, bias))
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    kind = bias is not None, x.dtype == torch.float32
    pointers = x.data_ptr(), added, weight.data_ptr(), biases, y.data_ptr()
    _norm_rows()(*pointers, rows, size, eps, *kind, torch.get_num_threads())
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
        size,
    )
    function.restype = None
    return function
