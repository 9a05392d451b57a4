"""Wait for work or for an order to stop."""

from __future__ import annotations

import asyncio
from typing import Any


async def wait_or_stop(stopping: asyncio.Event, *work: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Return when one of `work` is done, the worker is ordered to stop, or `timeout` has passed."""
    order = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({order, *work}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        order.cancel()
