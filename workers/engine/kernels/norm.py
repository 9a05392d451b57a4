"""Norms over the last dimension, with an optional addition first, in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHORT = 1024  # least elements of one program, which has several short rows


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [..., size] in a new tensor: layer norm with a bias, else RMS norm."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _launch(rows, None, weight, bias, out, eps)
    return out.view(x.shape)


def add_normed(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the norm of x + residual into x, and the sum into residual; return both.

    Both are contiguous [..., size].
    """
    size = x.shape[-1]
    _launch(x.view(-1, size), residual.view(-1, size), weight, bias, x.view(-1, size), eps)
    return x, residual


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """Compute the RMS norm of rows x [T, size], which may be apart, in place."""
    _launch(x, None, weight, None, x, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float) -> None:
    """Residual and output have rows as far apart as x."""
    count, size = x.shape
    if not count:
        return
    width, rows, warps = shape(size)
    _norm[(triton.cdiv(count, rows),)](
        x, residual, weight, bias, out, count, size, x.stride(0), eps, rows, width, num_warps=warps
    )


def shape(size: int) -> tuple[int, int, int]:
    """Return a program's numbers of columns, rows and warps for rows of `size`.

    Each thread gets at least 16 bytes at a time.
    """
    width = triton.next_power_of_2(size)
    rows = max(1, _SHORT // width)
    return width, rows, min(max(rows * width // 512, 4), 32)


@triton.jit(do_not_specialize=["count"])
def _norm(x, residual, weight, bias, out, count, size, stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < count) & (column < size)
    at = row.to(tl.int64) * stride + column
    values = tl.load(x + at, mask, 0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + at, mask, 0.0).to(tl.float32)
        # The norm is of the rounded sum, which the next layer reads.
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask)
        values = total.to(tl.float32)
    factor = tl.load(weight + column, column < size, 0.0).to(tl.float32)
    if bias is not None:
        mean = tl.sum(values, 1)[:, None] / size
        values = tl.where(mask, values - mean, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1)[:, None] / size + eps)
    values = values * scale * factor
    if bias is not None:
        values += tl.load(bias + column, column < size, 0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), mask)
