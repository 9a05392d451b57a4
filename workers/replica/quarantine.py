"""Quarantine: requests in flight during an engine crash run again in isolation, until they are
known to be harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jobs.protocol.requests import RequestKey
from workers.replica.intake import Intake
from workers.replica.running import Running

logger = logging.getLogger(__name__)

HARMLESS_TOKENS = 8
"""Tokens after which an isolated request is released from quarantine; it continues from its
checkpoint.
"""

_LOOK_SECONDS = 0.02


class Quarantine:
    """Runs quarantined requests of one replica in isolation; requeues all others when ordered to
    make room.
    """

    def __init__(
        self,
        intake: Intake,
        running: Running,
        requeue: Callable[[list[RequestKey], bool], Awaitable[int]],
    ) -> None:
        """`requeue` publishes pending results, then requeues the given requests from their
        checkpoints; its flag says whether they are released from quarantine.
        """
        self._intake = intake
        self._running = running
        self._requeue = requeue
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._begun = False
        self._ordered = False
        self._closed = False

    def begin(self) -> None:
        """Note that quarantined requests were passed to the engine."""
        self._begun = True
        self._wake.set()

    def make_room(self) -> None:
        """Requeue everything, since quarantined requests wait and no worker is idle."""
        self._ordered = True
        self._wake.set()

    async def run(self) -> None:
        """Run until closed."""
        try:
            while not self._closed:
                await self._wake.wait()
                self._wake.clear()
                begun, ordered = self._begun, self._ordered
                self._begun = self._ordered = False
                if begun:
                    await self._hold()
                elif ordered and not self._closed:
                    await self._requeue_all()
        finally:
            self._ended.set()

    async def close(self) -> None:
        """Stop isolating requests; return once a release in progress is complete."""
        self._closed = True
        self._wake.set()
        await self._ended.wait()

    async def _hold(self) -> None:
        logger.info("quarantine: running %d requests in isolation after an engine crash", len(self._running.keys()))
        while not self._running.all_have(HARMLESS_TOKENS):
            if self._closed:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        await self._requeue(self._running.keys(), True)
        self._intake.end_isolation()

    async def _requeue_all(self) -> None:
        await self._intake.pause()
        if not self._intake.isolated:
            count = await self._requeue(self._running.keys(), False)
            logger.info("quarantine: requeued %d requests to make room for quarantined ones", count)
        if not self._closed:
            self._intake.resume()
