"""Requeue the requests of a worker process, each with its generated tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from jobs.protocol.requests import Delta, RequestKey
from jobs.protocol.results import ApiError, Result, new_request_id
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Held, Queue, QueueUnavailable
from workers.engine.client.async_engine import EngineDeadError
from workers.replica.leases import Leases
from workers.replica.outbox import Outbox
from workers.replica.running import Running
from workers.replica.stopping import wait_or_stop

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 5.0
"""Seconds that a stopping worker waits for Redis to take its last results and requeued requests."""

_RETRY_SECONDS = 0.5


class Requeue:
    """Requeue requests, or put them in quarantine, from their last published state."""

    def __init__(
        self, queue: Queue, worker: str, running: Running, outbox: Outbox, leases: Leases, stopping: asyncio.Event
    ) -> None:
        self.cleared = False  # whether requests were released from quarantine
        self._queue = queue
        self._worker = worker
        self._running = running
        self._outbox = outbox
        self._leases = leases
        self._stopping = stopping

    async def from_checkpoints(self, keys: list[RequestKey], cleared: bool = False) -> int:
        """Publish pending results, then requeue the requests from their checkpoints; return how
        many.

        With `cleared` they are released from quarantine.
        """
        deltas = self._running.checkpoint(keys)
        held = self._running.drop(keys)
        await self.publish(deltas)
        await self.requeue(held, cleared)
        self.cleared = self.cleared or (cleared and bool(held))
        return len(held)

    async def publish(self, deltas: list[Delta]) -> None:
        """Publish these tokens and the pending results."""
        if not await self._in_time(self._outbox.deliver(deltas)):
            logger.warning("Redis unavailable; the last results are lost and their requests run again")

    async def requeue(self, held: list[Held], cleared: bool = False) -> None:
        """Requeue requests that do not run and are fully published."""
        await self._finish_leases(held, lambda: self._queue.requeue(self._worker, held, cleared=cleared))

    async def quarantine(self, held: list[Held], error: EngineDeadError) -> None:
        """Put requests in quarantine that may have caused the core's crash."""
        await self._finish_leases(held, lambda: self._queue.quarantine(self._worker, held, dead_letter(error)))

    async def _finish_leases(self, held: list[Held], action: Callable[[], object]) -> None:
        """Run `action` and drop the leases.

        The leases are renewed until Redis has recorded it: an expired lease would count as a
        worker's death.
        """
        if held:
            if not await self._in_time(_until_recorded(action)):
                logger.warning("Redis unavailable; %d requests wait until their leases expire", len(held))
            self._leases.drop(held)

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for Redis without a limit; once the worker is stopping, at most GOODBYE_SECONDS
        more.

        Returns whether the work was done.
        """
        task = asyncio.create_task(work)
        try:
            await wait_or_stop(self._stopping, task)
            done, _ = await asyncio.wait({task}, timeout=GOODBYE_SECONDS)
            if done:
                task.result()
            return bool(done)
        finally:
            task.cancel()


async def _until_recorded(action: Callable[[], object]) -> None:
    outage = OutageLog(logger, "retrying to requeue requests", "requests are requeued")
    while True:
        try:
            await asyncio.to_thread(action)
            return
        except QueueUnavailable as error:
            outage.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)


def dead_letter(error: EngineDeadError) -> Result:
    """Return the result of a request that crashed an engine core even in isolation."""
    message = (
        "The request was given up: the engine failed every time it ran, the last time without other requests:"
        f" {error.reason}."
    )
    return ApiError(500, message, "server_error", code="engine_crashed").result(new_request_id())
