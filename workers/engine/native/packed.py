"""Matrices of bf16 weights in the order in which the processor multiplies with them
(`source/matmul.c`). The plain ones are not kept.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from workers.engine.native.library import load
from workers.engine.native.memory import huge_zeros

PANEL = 32
ACTIVATIONS = {"silu": 1, "swish": 1, "gelu_new": 2, "gelu_fast": 2, "gelu_pytorch_tanh": 2, "gelu": 3, "relu": 4}


class _Matrix(ctypes.Structure):
    """`packed_matrix` of matmul.c."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_ssize_t),
        ("k", ctypes.c_ssize_t),
        ("activation", ctypes.c_int),
        ("gated", ctypes.c_int),
        ("to_float", ctypes.c_int),
    ]


def can_pack(dtype: torch.dtype, size_in: int) -> bool:
    """Return whether this processor multiplies with packed matrices of that dtype and row length.

    Raises NativeUnavailable.
    """
    return dtype == torch.bfloat16 and size_in > 0 and size_in % 2 == 0 and bool(load().matmul_supported())


class PackedMatrix:
    """x [..., k] -> activation(x weight.T + bias) [..., n] for bf16 weight [n, k] and bias [n], in
    float32 if `to_float`.

    If `gated`, weight is gates above what they let through, and the result [..., n / 2] is
    activation(gate) * up.
    """

    __slots__ = ("_bias", "_dtype", "_matrix", "_multiply", "_panels", "_size_in", "columns", "pointer")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        to_float: bool = False,
    ) -> None:
        n, self._size_in = weight.shape
        panels = -(-(n // 2) // (PANEL // 2)) if gated else -(-n // PANEL)
        self._panels = huge_zeros((panels, self._size_in // 2, PANEL, 2), torch.bfloat16)
        _pack(weight, gated, self._panels)
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros((panels, 1, PANEL, 2), dtype=torch.bfloat16)
            _pack(torch.stack((bias, bias), 1), gated, self._bias)
            self._bias = self._bias[..., 0].contiguous()
        self.columns, self._dtype = (n // 2 if gated else n), torch.float32 if to_float else torch.bfloat16
        number = ACTIVATIONS[activation] if activation else 0
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._matrix = _Matrix(self._panels.data_ptr(), bias_pointer, n, self._size_in, number, gated, to_float)
        self.pointer = ctypes.addressof(self._matrix)
        self._multiply = _functions().packed_matmul

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self._size_in or x.dtype != torch.bfloat16:
            raise ValueError(f"{x.dtype} {list(x.shape)} where rows of {self._size_in} bfloat16 are multiplied")
        x = x.contiguous()
        rows = x.numel() // self._size_in
        y = torch.empty((*x.shape[:-1], self.columns), dtype=self._dtype)
        self._multiply(self.pointer, x.data_ptr(), rows, y.data_ptr())
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [R, k] of the weight by int64 indices [R] below n, as an embedding table
        gives them.

        Not of a gated matrix.
        """
        y = torch.empty((len(indices), self._size_in), dtype=torch.bfloat16)
        _functions().packed_lookup(self.pointer, indices.data_ptr(), len(indices), y.data_ptr())
        return y


def _pack(weight: Tensor, gated: bool, panels: Tensor) -> None:
    weight = weight.contiguous()
    _functions().pack_rows(weight.data_ptr(), *weight.shape, gated, panels.data_ptr())


@functools.cache
def _functions() -> ctypes.CDLL:
    library, pointer, size = load(), ctypes.c_void_p, ctypes.c_ssize_t
    library.pack_rows.argtypes = (pointer, size, size, ctypes.c_int, pointer)
    library.packed_matmul.argtypes = (pointer, pointer, size, pointer)
    library.packed_lookup.argtypes = (pointer, pointer, size, pointer)
    for function in (library.pack_rows, library.packed_matmul, library.packed_lookup):
        function.restype = None
    return library
