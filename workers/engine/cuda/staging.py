"""Asynchronous copies between host and device.

A ring of pinned buffers for a step's inputs, and a stream of its own for its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESULTS = 4
"""Most steps whose results are being copied to the host at once."""

_BUFFERS = 3
_cuda: Any = torch.cuda


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting; torch keeps the pinned memory until the copy
    ends.
    """
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class StagingRing:
    """Buffers of 32-bit words, filled on the host and copied in turn to one place on the device.

    A buffer is filled again when its copy is complete. Running one step ahead, this never waits:
    when a step is launched, all steps except the last have been retired, so their copies are
    complete. Two buffers are enough for that; the third is for repeating a launch that failed for
    want of memory.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.on_device = torch.zeros(words, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=cuda) for _ in range(_BUFFERS)]
        self._arrays: list[NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._copied = [_cuda.Event() for _ in self._hosts] if cuda else None
        self._at = 0

    def next(self) -> NDArray[np.int32]:
        """Return the buffer to fill; it has the content of its last copy."""
        self._at = (self._at + 1) % len(self._hosts)
        if self._copied is not None and not self._copied[self._at].query():
            self._copied[self._at].synchronize()
        return self._arrays[self._at]

    def send(self, words: int) -> None:
        """Copy the first `words` words of the buffer from `next`, on the current stream."""
        self.on_device[:words].copy_(self._hosts[self._at][:words], non_blocking=True)
        if self._copied is not None:
            self._copied[self._at].record()


class ResultCopies:
    """Copies results of steps to the host on a separate stream, so that a copy does not wait for a
    later step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[torch.cuda.Event] = deque()

    def make_room(self) -> None:
        """Make the device wait until the results of all steps are copied, except those of the last
        `RESULTS - 1` steps.
        """
        if len(self._under_way) >= RESULTS:
            torch.cuda.current_stream().wait_event(self._under_way.popleft())

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Return the tensors' copies on the host, and the event after which they are complete.

        Without an event they are complete at once.
        """
        if self._stream is None:
            return [tensor.clone() for tensor in tensors], None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
        for tensor in tensors:
            tensor.record_stream(self._stream)
        done = _cuda.Event(enable_timing=True)
        done.record(self._stream)
        self._under_way.append(done)
        return copies, done
