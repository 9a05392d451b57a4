"""What a want of memory looks like, on the host and on a device."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory for a tensor or an array could not be had, on the device, where cuBLAS
    takes some at its first use, or on the host.
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
    """Return the first line of an error's text, which for torch is followed by advice; else its
    kind.
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__
