"""Waiting for a condition with a deadline, so that no test sleeps for a fixed time."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """A condition did not become true in time."""


def wait_until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Polls `condition` until it is truthy and returns its value; fails the test after `timeout`
    seconds, naming `what`.

    The last look begins after the deadline, so that a test that was held up until then still sees
    what is true by now.
    """
    return _poll(condition, bool, timeout, what)


def wait_for_value(read: Callable[[], T], expected: T, timeout: float, what: str) -> None:
    """The same until `read` returns the expected value; the failure shows what it returned last."""
    _poll(read, lambda value: value == expected, timeout, what)


def check_time(seconds: float, limit: float, what: str) -> None:
    """Fail the test where `what`, which has come about, took longer than `limit` seconds: by a time
    limit, as the machine may have been held up.
    """
    if seconds > limit:
        raise WaitTimeout(f"{what} took {seconds:.2f} s, more than {limit:g} s")


def _poll(read: Callable[[], T], fits: Callable[[T], bool], timeout: float, what: str) -> T:
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        is_last = time.monotonic() > deadline
        value = read()
        if fits(value):
            return value
        if is_last:
            raise WaitTimeout(f"waited {timeout} s in vain for: {what} (last value: {value!r})")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def wait_for_end(work: Callable[[], T], timeout: float, what: str) -> T:
    """Run `work` in a thread and return its result; fail the test where it has not ended after
    `timeout` seconds.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    threading.Thread(target=run, daemon=True).start()
    wait_until(lambda: results or errors, timeout, what)
    if errors:
        raise errors[0]
    return results[0]
