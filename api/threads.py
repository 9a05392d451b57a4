"""Pools of threads for blocking calls, one for each thing to wait for, so that none delays another.

Work on files and batches has the framework's threads (`run_in_threadpool`, and routes that are
plain functions). Uploads have their own, and so have copies of large files.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIVE = ThreadPoolExecutor(32, "live")
"""Waits for Redis and computes, for live calls and streams."""

SUBMISSIONS = ThreadPoolExecutor(32, "submit")
"""Submits live calls, which Redis may have no room for while it still has answers."""

COPIES = ThreadPoolExecutor(4, "copy")
"""Copies lines of input files, for batches that are retried."""

APPENDS = ThreadPoolExecutor(32, "append")
"""Appends requests to open batches; those of one batch wait for the same commit."""

JOINS = ThreadPoolExecutor(4, "join")
"""Copies the parts of uploads into files."""

KEYS = ThreadPoolExecutor(1, "keys")
"""Reads the API keys on disk; requests that wait together share one reading."""


async def run_in(threads: ThreadPoolExecutor, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of `action`. A call that is cancelled before it starts is dropped."""
    return await asyncio.get_running_loop().run_in_executor(threads, partial(action, *arguments, **options))
