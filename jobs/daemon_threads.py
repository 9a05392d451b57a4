"""Work in threads that do not delay the end of the process, unlike those of an executor."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_beside(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread of its own, and return its future result."""
    outcome: Future[T] = Future()
    threading.Thread(target=_run, args=(work, outcome), daemon=True).start()
    return outcome


def _run(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
