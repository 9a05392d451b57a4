"""Slots: which of the long jobs may run side by side in one process.

Jobs of large inputs leave slots for those of small ones, and a job that proves to be long, whatever
its size, leaves its slot for short jobs. So a small batch is validated and finalized beside any
number of large and stuck ones.
"""

import math
import threading
import time
from collections.abc import Sequence

from jobs.queue import keys
from jobs.queue.request_queue import Queue

_SHORT_BYTES = 4 * 1024 * 1024  # of input, which takes about 0.1 s
_SHORT_SECONDS = 1.0
_LONG_JOBS = 8
_SHORT_JOBS = 4
_MOST_JOBS = 64


class Slots:
    """The jobs that run in this process. Taken by one thread, released by any."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}  # monotonic seconds, by the job's name; long from the start: -inf
        self._changed = threading.Condition()

    def take(self, name: str, is_long: bool) -> None:
        """Count a job as running."""
        with self._changed:
            self._began[name] = -math.inf if is_long else time.monotonic()

    def release(self, name: str) -> None:
        """Count a job as ended."""
        with self._changed:
            del self._began[name]
            self._changed.notify()

    def free(self) -> tuple[bool, bool]:
        """Return whether a short job may begin, and whether a long one may too."""
        with self._changed:
            before = time.monotonic() - _SHORT_SECONDS
            long = sum(began < before for began in self._began.values())
            short = len(self._began) - long
        may_begin = short < _SHORT_JOBS and len(self._began) < _MOST_JOBS
        return may_begin, may_begin and long < _LONG_JOBS

    def wait(self, seconds: float) -> None:
        """Wait until a job ends, or for `seconds`: one may have proved to be long."""
        with self._changed:
            self._changed.wait(seconds)


def are_long(queue: Queue, batches: Sequence[str]) -> list[bool]:
    """Return for each batch whether its input is large, or of unknown size."""
    sizes = queue.commands(("HGET", keys.batch(batch), "input_bytes") for batch in batches)
    return [not 0 < int(size or 0) <= _SHORT_BYTES for size in sizes]
