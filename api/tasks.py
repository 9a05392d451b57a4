"""Tasks that may fail when nothing waits for them any more."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


def start(work: Awaitable[T]) -> asyncio.Future[T]:
    """Start `work`. An unread failure is dropped; asyncio would log it with its traceback."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_note)
    return task


def _note(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()
