"""Trials: requests that an engine core had when it ended by itself run again with nothing beside
them, until they are found harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from jobs.protocol.requests import RequestKey

logger = logging.getLogger(__name__)

HARMLESS_TOKENS = 8
"""A request that has got so many tokens since it was suspected did no harm: it goes on from where
it would have been last time.
"""

_LOOK_SECONDS = 0.02


class TrialIntake(Protocol):
    """What this needs of `workers.replica.intake.Intake`."""

    @property
    def in_trial(self) -> bool: ...

    def end_trial(self) -> None: ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...


class TrialRequests(Protocol):
    """What this needs of `workers.replica.running.Running`."""

    def keys(self) -> list[RequestKey]: ...

    def all_have(self, tokens: int) -> bool: ...


class Trials:
    """Watches over the trials of one replica, and makes room for one when told to."""

    def __init__(
        self, intake: TrialIntake, running: TrialRequests, give_up: Callable[[list[RequestKey], bool], Awaitable[int]]
    ) -> None:
        """`give_up` hands requests back with what they have so far, acquitted or not, after all
        results that wait for Redis.
        """
        self._intake = intake
        self._running = running
        self._give_up = give_up
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._begun = False
        self._ordered = False
        self._closed = False

    def begin(self) -> None:
        """The requests of a trial were handed to the engine."""
        self._begun = True
        self._wake.set()

    def make_room(self) -> None:
        """Suspects wait and nobody is free to try them: everything else is to go back."""
        self._ordered = True
        self._wake.set()

    async def run(self) -> None:
        """Until closed."""
        try:
            while not self._closed:
                await self._wake.wait()
                self._wake.clear()
                begun, ordered = self._begun, self._ordered
                self._begun = self._ordered = False
                if begun:
                    await self._hold()
                elif ordered and not self._closed:
                    await self._hand_all_back()
        finally:
            self._ended.set()

    async def close(self) -> None:
        """Begins and ends no more trials; returns once none is being ended."""
        self._closed = True
        self._wake.set()
        await self._ended.wait()

    async def _hold(self) -> None:
        logger.info(
            "%d requests run by themselves: an engine core has ended with them before", len(self._running.keys())
        )
        while not self._running.all_have(HARMLESS_TOKENS):
            if self._closed:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        await self._give_up(self._running.keys(), True)
        self._intake.end_trial()

    async def _hand_all_back(self) -> None:
        await self._intake.pause()
        if not self._intake.in_trial:
            count = await self._give_up(self._running.keys(), False)
            logger.info("%d requests were handed back, to make room for suspects", count)
        if not self._closed:
            self._intake.resume()
