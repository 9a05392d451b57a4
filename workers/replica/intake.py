"""Intake: takes from Redis as many requests as the engine can soon use, and no more, so that other
workers find work too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jobs.protocol.requests import Claim, Finished
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.scripts import MAX_ITEMS
from workers.replica.leases import Leases
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.running import Load

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often an idle worker asks for work without a notification."""

_PAUSE_AFTER_ERROR = 0.5
_FIRST_CLAIM = 16  # requests; no fewer than a quarantine group has


class Intake:
    """Claims and prepares.

    The next claim is made when enough room is free, or when an order from Redis wakes it.
    """

    def __init__(
        self,
        queue: Queue,
        worker: str,
        models: list[str],
        max_num_seqs: int,
        leases: Leases,
        preparation: Preparation,
        load: Callable[[], Load],
        start: Callable[[list[PreparedRequest], list[Finished]], None],
    ) -> None:
        """`load` is what the engine has; `start` takes what was prepared, and the results of what
        cannot run.
        """
        self._queue = queue
        self._worker = worker
        self._models = models
        self._room = max_num_seqs + max(2, max_num_seqs // 8)
        # Live calls get in even when batch work fills every slot
        self._live_room = self._room + max_num_seqs
        self._least = max(1, max_num_seqs // 16)
        self._leases = leases
        self._preparation = preparation
        self._load = load
        self._start = start
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = False
        self._isolated = False
        self._woken = True
        self._more = True
        self._failing = False
        # Rises over the life of the worker's name, whatever happened to earlier claims
        self._seq = time.time_ns() // 1000
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")

    def wake(self) -> None:
        """There may be work."""
        self._woken = True
        self._wake.set()

    def room_made(self) -> None:
        """Requests have ended."""
        if self._more:
            self._wake.set()

    @property
    def isolated(self) -> bool:
        """Whether the last claim returned quarantined requests, beside which nothing may run."""
        return self._isolated

    def end_isolation(self) -> None:
        """Claim again: no quarantined request is left here."""
        self._isolated = False
        self._more = True
        self.wake()

    async def pause(self) -> None:
        """Claims nothing more until `resume`; returns when what was being prepared has been handed
        on.
        """
        self._paused = True
        await self._idle.wait()

    def resume(self) -> None:
        self._paused = False
        self.wake()

    def close(self) -> None:
        """Wait for nothing."""
        self._paused = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        """Claims until cancelled."""
        while True:
            self._wake.clear()
            if not self._wants_more():
                await self._sleep(LOOK_SECONDS)
            elif not await self._take():
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

    def _wants_more(self) -> bool:
        if self._paused or self._isolated:
            return False
        load = self._load()
        return (self._woken and self._free_for_live(load) > 0) or (self._more and self._free(load) >= self._least)

    def _free(self, load: Load) -> int:
        return self._room - load.batch - load.live

    def _free_for_live(self, load: Load) -> int:
        """Requests with many choices may have taken more than the room for batch work; that is not
        at the expense of live calls.
        """
        return self._live_room - min(load.batch, self._room) - load.live

    def _requests_for(self, free: int, load: Load) -> int:
        """How many requests fill so many places, if they have as many choices as those in flight; a
        few if there are none to go by.
        """
        if free <= 0:
            return 0
        return max(1, free * load.requests // (load.batch + load.live)) if load.requests else min(free, _FIRST_CLAIM)

    async def _take(self) -> bool:
        """Claims once, and hands on what was given; False when Redis cannot answer."""
        loop = asyncio.get_running_loop()
        load = self._load()
        room = self._requests_for(self._free(load), load)
        live_room = self._requests_for(self._free_for_live(load), load)
        self._idle.clear()
        try:
            woken, self._woken = self._woken, False
            claims = await loop.run_in_executor(self._thread, self._claim, room, live_room)
            if claims is None:
                self._woken = self._woken or woken  # it may have been woken meanwhile
                return False
            if room:
                self._more = len(claims) >= min(room, MAX_ITEMS)
            if claims:
                self._isolated = any(claim.engine_crashes for claim in claims)
                self._leases.add((claim.key, claim.fence) for claim in claims)
                self._start(*await loop.run_in_executor(self._thread, self._preparation.prepare, claims))
            return True
        finally:
            self._idle.set()

    def _claim(self, room: int, live_room: int) -> list[Claim] | None:
        """What was given; None when Redis cannot answer, and then the same number asks again."""
        try:
            claims = self._queue.claim(self._worker, self._seq, room, models=self._models, live_limit=live_room)
        except QueueUnavailable as error:
            if not self._failing:
                logger.warning("Redis unavailable; not claiming requests: %s", error)
            self._failing = True
            return None
        self._failing = False
        self._seq += 1
        if claims:
            logger.debug("claimed %d requests", len(claims))
        return claims

    async def _sleep(self, seconds: float) -> None:
        try:
            # Python 3.11's wait_for may lose a cancellation that comes with the event
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            self._woken = True
