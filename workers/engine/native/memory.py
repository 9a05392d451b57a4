"""Memory for weights and the KV cache, which a step reads from end to end.

The memory is zeroed, and the system provides it page by page when it is touched. It is in huge
pages where the system allows that: with small pages, a processor spends a third of its time on
address translation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
# Size of a mapping shared by small tensors; else each would leave most of a huge page unused
_SHARED_SIZE = 64 << 20
_ALIGNMENT = 64  # bytes: a line of the processor's cache
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 on


class _Mapping:
    """Memory allocated from its beginning to its end, and freed with the last tensor in it."""

    def __init__(self, size: int) -> None:
        try:
            self._memory = mmap.mmap(
                -1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )  # shared ones get small pages
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no address space for {size} bytes: {error}") from error
        with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE
        self._left = whole[start : start + size]

    def take(self, size: int) -> Tensor | None:
        """Allocate uint8 [size]; return None if less is left."""
        if size > len(self._left):
            return None
        taken, self._left = self._left[:size], self._left[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken


_shared: list[_Mapping] = []


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the host.

    Raises MemoryError if it does not fit into the address space.
    """
    size = math.prod(shape) * dtype.itemsize
    taken = _own(size) if size > _SHARED_SIZE // 2 else _share(size)
    return taken.view(dtype).view(tuple(shape))


def zeros_together(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors [size] of zeros in one new mapping.

    The mapping is freed with the last of the tensors.
    """
    lengths = [size * dtype.itemsize for size in sizes]
    mapping = _Mapping(sum(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths))
    return [_taken(mapping, length).view(dtype) for length in lengths]


def populate(tensor: Tensor) -> bool:
    """Touch all pages of a contiguous tensor without changing it.

    Returns whether the system supports it and succeeded.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start)
    return bool(_libc().madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) == 0)


def release_freed() -> None:
    """Return freed memory to the system; else the C library keeps gaps between blocks in use."""
    with contextlib.suppress(AttributeError):  # another library than glibc
        _libc().malloc_trim(0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _own(size: int) -> Tensor:
    return _taken(_Mapping(size), size)


def _taken(mapping: _Mapping, size: int) -> Tensor:
    taken = mapping.take(size)
    assert taken is not None
    return taken


def _share(size: int) -> Tensor:
    taken = _shared[0].take(size) if _shared else None
    if taken is None:
        _shared[:] = [_Mapping(_SHARED_SIZE)]
        taken = _taken(_shared[0], size)
    return taken
