"""A limit to how long a piece of Python may run in its thread, such as a template that loops over
what a request holds.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from workers.text.errors import TextError

Result = TypeVar("Result")

_CHECKS = 10  # per limit


class TimeLimitError(TextError):
    """The time is up."""


class _TimeIsUp(BaseException):
    """What is raised in the thread: jinja drops an `Exception` of a value that it shows."""


class TimeLimit:
    """Raises an exception in a thread that computes for too long, at its next Python instruction:
    it ends loops of Python, not a long call of C. What counts is the thread's processor time, which
    it does not use up while it is stopped or starved. Where something drops the exception, as a
    destructor that just runs, it comes again after the same time. A thread of its own watches while
    something runs, and for one look longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}  # by thread, on its clock
        self._late: set[int] = set()  # threads in which the exception was raised
        self._watching = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns.

        Raises TimeLimitError in the midst of it when it takes longer, or a tenth more than that.
        """
        thread = threading.get_ident()
        with self._lock:
            if not self._watching:
                threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
                self._watching = True
            self._deadlines[thread] = _clock(thread) + self.seconds
        try:
            try:
                return work()
            finally:
                self._end(thread)
        except _TimeIsUp:
            self._end(thread)  # where it arrived in the midst of that
            raise TimeLimitError from None

    def _end(self, thread: int) -> None:
        with self._lock:
            self._deadlines.pop(thread, None)
            if thread in self._late:
                self._late.remove(thread)
                # It may not have arrived yet, and must not arrive later
                _raise_in(thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(self.seconds / _CHECKS)
            with self._lock:
                if not self._deadlines:
                    self._watching = False
                    return
                for thread, deadline in self._deadlines.items():
                    if deadline < (now := _clock(thread)):
                        self._deadlines[thread] = now + self.seconds
                        self._late.add(thread)
                        _raise_in(thread, _TimeIsUp)


def _clock(thread: int) -> float:
    """Return seconds that a thread has computed; without a clock of its own (macOS), seconds."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
