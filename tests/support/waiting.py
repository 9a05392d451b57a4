"""Waiting for a condition with a deadline, so that no test sleeps for a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Polls `condition` until it is truthy and returns its value; fails the test after `timeout` seconds, naming `what`."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for: {what} (last value: {value!r})")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
