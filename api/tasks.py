"""Tasks that may fail when nothing waits for them any more, and their time limits."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_LOOKS = 8


def start(work: Awaitable[T]) -> asyncio.Future[T]:
    """Start `work`. An unread failure is dropped; asyncio would log it with its traceback."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_note)
    return task


async def within(work: Awaitable[T], seconds: float) -> T:
    """Return the result of `work`. Raise TimeoutError after `seconds`.

    A result that is there counts, also if it comes late. Time counts in steps, each of which ends
    with a look at the result, so that a process without processor time gives up later.
    """
    task = start(work)
    try:
        for _ in range(_LOOKS):
            if (await asyncio.wait({task}, timeout=seconds / _LOOKS))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


def _note(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()
