"""Recognize errors for want of memory, on the host and on a device."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the host or on the device.

    Allocations of cuBLAS, which needs memory at its first use, count too.
    """
    signs = (
        "out of memory",
        "can't allocate memory",
        "std::bad_alloc",
        "ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",
    )
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text (torch adds advice below it), or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
