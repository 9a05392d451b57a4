"""What goes back to Redis: tokens that are due, and results.

One delivery at a time, so that a request's tokens come before its end.

While Redis is unavailable nothing is lost and nothing piles up: results wait here, tokens wait with
their requests. A Redis without memory refuses tokens but takes results, which free memory once they
are drained: then results go first, with the tokens that belong to them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from jobs.protocol.requests import Delta, Finished
from jobs.queue.request_queue import Held, Queue, QueueFull, QueueUnavailable

logger = logging.getLogger(__name__)

COALESCE_SECONDS = 0.05
"""Longest time that watched tokens and results wait to be sent together."""

_PAUSE_AFTER_ERROR = 0.2


class Outbox:
    """Used from the event loop; Redis is called in a thread of its own."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        stream_interval: float,
        generated: Callable[[], int],
        on_ended: Callable[[list[Held]], None],
        on_lost: Callable[[list[Held]], None],
    ) -> None:
        """`generated` says how many tokens the worker has generated in its life, in the sending
        thread.

        `on_ended` is called with leases that ended with a result, `on_lost` with lost ones.
        """
        self._queue = queue
        self._worker = worker
        self._sweep_seconds = min(stream_interval / 4, 0.5)
        self._generated = generated
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._accepted: list[Delta] = []
        # By a full Redis; they come before any later ones of the same requests
        self._refused: list[Delta] = []
        self._finished: list[Finished] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._sending = asyncio.Lock()
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._failing = False

    def accept(self, delta: Delta) -> None:
        """Send the first message of a live call at once."""
        self._accepted.append(delta)
        self._wake_at(0.0)

    def finish(self, finished: Finished) -> None:
        """Commit a result: at once for a live call, else with those that end about then."""
        self._finished.append(finished)
        self._wake_at(0.0 if finished.key.live else self._last + COALESCE_SECONDS)

    def tokens_wait(self, first: bool) -> None:
        """Watched requests have new tokens, the first ones of some of them."""
        self._wake_at(0.0 if first else self._last + COALESCE_SECONDS)

    def requests_run(self) -> None:
        """There are requests whose tokens will be due at some time."""
        self._wake_at(self._last + self._sweep_seconds)

    async def run(self, due: Callable[[], list[Delta]], busy: Callable[[], bool]) -> None:
        """Deliver results and the tokens that are `due`, which is asked now and then while requests
        run (`busy`), until cancelled.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.deliver(due())
            if busy():
                self._wake_at(self._last + self._sweep_seconds)

    async def deliver(self, deltas: list[Delta]) -> None:
        """Publish these tokens and commit the results there are; return once Redis has them."""
        loop = asyncio.get_running_loop()
        async with self._sending:
            deltas, self._accepted, self._refused = self._refused + self._accepted + deltas, [], []
            finished, self._finished = self._finished, []
            if deltas or finished:
                lost = await loop.run_in_executor(self._thread, self._send, deltas, finished)
                if lost is None:
                    return
                self._on_ended([(item.key, item.fence) for item in finished])
                if lost:
                    self._on_lost(lost)
            self._last = loop.time()

    def close(self) -> None:
        """Give up what Redis does not take; nothing is sent any more."""
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, deltas: list[Delta], finished: list[Finished]) -> list[Held] | None:
        """The leases that turned out to be lost; None when it was closed before Redis answered."""
        while not self._closed.is_set():
            generated = self._generated()
            try:
                try:
                    lost = set(self._queue.publish(self._worker, deltas, generated)) if deltas else set()
                except QueueFull as error:
                    self._warn(error)
                    finished, self._refused = with_their_tokens(finished, deltas)
                    deltas, lost = [], set()
                if finished:
                    self._queue.commit(self._worker, finished, generated)
                    logger.debug("committed %d results", len(finished))
            except QueueUnavailable as error:
                self._warn(error)
                self._closed.wait(_PAUSE_AFTER_ERROR)
                continue
            if self._failing and not self._refused:
                logger.info("Redis available again; publishing results")
                self._failing = False
            return [(delta.key, delta.fence) for delta in deltas if delta.key in lost]
        return None

    def _warn(self, error: QueueUnavailable) -> None:
        if not self._failing:
            logger.warning("Redis unavailable; holding tokens and results: %s", error)
        self._failing = True

    def _wake_at(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        if when <= loop.time():
            self._wake.set()
        elif (
            self._timer is None
            or self._timer.cancelled()
            or self._timer.when() > when
            or self._timer.when() <= loop.time()
        ):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(when, self._wake.set)


def with_their_tokens(finished: list[Finished], deltas: list[Delta]) -> tuple[list[Finished], list[Delta]]:
    """Results that carry all tokens of their requests, and the deltas that are left, of requests
    that go on.
    """
    by_lease: dict[Held, list[Delta]] = {(item.key, item.fence): [] for item in finished}
    left: list[Delta] = []
    for delta in deltas:
        by_lease.get((delta.key, delta.fence), left).append(delta)
    joined = [
        (item, [*by_lease[item.key, item.fence], *([item.delta] if item.delta is not None else [])])
        for item in finished
    ]
    return [msgspec.structs.replace(item, delta=_join(parts)) for item, parts in joined], left


def _join(deltas: list[Delta]) -> Delta | None:
    if not deltas:
        return None
    chunks = [chunk for delta in deltas for chunk in delta.chunks]
    return msgspec.structs.replace(deltas[-1], chunks=chunks, accepted=False)
