"""Timing of work on a device: CUDA events around calls that are queued back to back, so that the
launch of a call overlaps with the previous one.
"""

import statistics
import time
from collections.abc import Callable

import torch

_BATCHES = 5


def median_seconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the seconds of one call: the median of batches of `calls`, after a warm-up batch."""
    measure = _by_events if device.type == "cuda" else _by_clock
    return statistics.median([measure(work, calls) for _ in range(_BATCHES + 1)][1:])


def _by_events(work: Callable[[], object], calls: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(calls):
        work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / calls


def _by_clock(work: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls
