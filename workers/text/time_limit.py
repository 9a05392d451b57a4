"""Limit how long Python code may run in its thread, such as a template that loops over the content
of a request.
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
    """The time limit was exceeded."""


class _TimeIsUp(BaseException):
    """The exception raised in the thread; Jinja would drop an `Exception` of a value that it
    shows.
    """


class TimeLimit:
    """Raise an exception in a thread that computes for too long, at its next Python instruction.

    It ends loops in Python, but not a long call into C. The limit applies to the thread's processor
    time, so a stopped or starved thread does not exceed it. If something drops the exception, for
    example a running destructor, it is raised again after the same time. A watching thread lasts
    while work runs, and for one check longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}  # by thread, in its processor time
        self._late: set[int] = set()  # threads in which the exception was raised
        self._watching = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`.

        Raises TimeLimitError if the work exceeds the limit, at most a tenth of the limit later.
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
            self._end(thread)  # if it was raised during the call above
            raise TimeLimitError from None

    def _end(self, thread: int) -> None:
        with self._lock:
            self._deadlines.pop(thread, None)
            if thread in self._late:
                self._late.remove(thread)
                # It may still be pending, and must not be raised later
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
    """Return the processor seconds of a thread, or seconds if threads have no clock (macOS)."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
