"""Threads for calls that block, apart by what they wait for: none of these keeps another waiting.

Work on files and batches has the threads of the framework (`run_in_threadpool`, and routes that are
plain functions), uploads have theirs.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIVE = ThreadPoolExecutor(32, "live")
"""Waits for Redis, and computes, for live calls and streams."""

KEYS = ThreadPoolExecutor(1, "keys")
"""Looks at the API keys on disk; the first one looks for all who wait."""


async def run_in(threads: ThreadPoolExecutor, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what `action` returns. Who leaves before it was begun gives its turn up."""
    return await asyncio.get_running_loop().run_in_executor(threads, partial(action, *arguments, **options))
