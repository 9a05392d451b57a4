"""Deliver due tokens and results to Redis.

Deliveries run one at a time, so that a request's tokens precede its end.

While Redis is unavailable, nothing is lost and memory stays bounded: results wait in the outbox,
tokens stay with their requests. A Redis that is out of memory refuses tokens but takes results,
which free memory once drained; results then go first, with the tokens of their requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from jobs.protocol.requests import Delta, Finished
from jobs.queue.outage_log import OutageLog
from jobs.queue.publisher import Publisher
from jobs.queue.request_queue import Held, Queue, QueueFull, QueueUnavailable

logger = logging.getLogger(__name__)

COALESCE_SECONDS = 0.05
"""Longest time that batch results, and tokens of watched batch requests, wait to be sent
together.
"""

BACKLOG_SECONDS = 0.25
"""The same for results while no tokens are watched and more lines are queued than this worker can
take: each call costs Redis as much as several results.
"""

_MOST_RESULTS = 100
"""Most results in one call: Redis does nothing else while it stores them, for a millisecond."""

_SHORTEST_INTERVAL = 0.003
"""Seconds between deliveries: tokens of live calls are sent at once, but a fast engine must not
flood Redis.
"""

_PAUSE_AFTER_ERROR = 0.2


class Outbox:
    """Deliver from the event loop; a separate thread waits for Redis."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        stream_interval: float,
        generated: Callable[[], int],
        on_ended: Callable[[list[Held]], None],
        on_lost: Callable[[list[Held]], None],
    ) -> None:
        """Create the outbox.

        `generated` returns how many tokens the worker has generated in its life; it is called in
        the sending thread. `on_ended` is called with leases that ended with a result, `on_lost`
        with lost leases.
        """
        self._queue = queue
        self._worker = worker
        self._publisher = Publisher(queue, worker)
        self._sweep_seconds = max(COALESCE_SECONDS, min(stream_interval / 4, 0.5))
        self._backlog_seconds = min(BACKLOG_SECONDS, stream_interval / 8)
        self.results_may_wait: Callable[[], bool] = lambda: False  # whether results may wait for BACKLOG_SECONDS
        self._generated = generated
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._accepted: list[Delta] = []
        self._acceptances: dict[Held, asyncio.TimerHandle] = {}  # sent by the timer, unless a result comes first
        # Results refused by a full Redis; they precede later ones of the same requests
        self._refused: list[Delta] = []
        self._finished: list[Finished] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0  # time of the last full delivery
        self._next = 0.0  # earliest time of the next delivery
        self._others_wait = False  # whether anything but live calls has new data
        self._all_at_once = False
        self._sending = asyncio.Lock()
        self._is_answered = True  # whether Redis has answered everything sent
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._outage = OutageLog(logger, "holding tokens and results", "publishing results")

    def accept(self, delta: Delta) -> None:
        """Send the first message of a live call at once."""
        self._accepted.append(delta)
        self._wake_at(self._next)

    def accept_later(self, delta: Delta) -> None:
        """Send the first message of a live call, unless its result comes soon."""
        lease, loop = (delta.key, delta.fence), asyncio.get_running_loop()
        self._acceptances[lease] = loop.call_later(COALESCE_SECONDS, self._accept_late, lease, delta)

    def finish(self, finished: Finished) -> None:
        """Commit a result: at once for a live call, else together with others."""
        if acceptance := self._acceptances.pop((finished.key, finished.fence), None):
            acceptance.cancel()
        self._finished.append(finished)
        if finished.key.live:
            self._wake_at(self._next)
        else:
            self._others_wait = True
            waits = len(self._finished) < _MOST_RESULTS
            self._wake_at(self._last + (self._results_seconds() if waits else COALESCE_SECONDS))

    def live_tokens_wait(self) -> None:
        """Wake for new tokens of live calls; they are sent at once."""
        self._wake_at(self._next)

    def tokens_wait(self, first: bool) -> None:
        """Wake for new tokens of watched batch requests; `first` if they are the first of a
        request.
        """
        self._others_wait = True
        self._all_at_once = self._all_at_once or first
        self._wake_at(self._next if first else self._last + COALESCE_SECONDS)

    def requests_run(self) -> None:
        """Wake: running requests will have tokens due later."""
        self._wake_at(self._last + self._sweep_seconds)

    async def run(self, due: Callable[[bool], Iterable[list[Delta]]], busy: Callable[[], bool]) -> None:
        """Deliver results and `due` tokens until cancelled.

        `due` yields tokens of live calls alone or of all requests; it is called periodically while
        `busy`. Each group of tokens is sent before the next one is requested.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if (pause := self._next - loop.time()) > 0:
                await asyncio.sleep(pause)
            self._wake.clear()
            live_only = not self._all_at_once and loop.time() < self._last + COALESCE_SECONDS
            if not live_only:
                self._others_wait = self._all_at_once = False
            await self._deliver(due(live_only), live_only)
            if self._others_wait:
                self._wake_at(self._last + self._results_seconds())
            elif busy():
                self._wake_at(self._last + self._sweep_seconds)

    async def deliver(self, deltas: list[Delta]) -> None:
        """Publish these tokens and commit the pending results; return once Redis has stored
        them.
        """
        await self._deliver([deltas], False)

    async def _deliver(self, groups: Iterable[list[Delta]], live_only: bool) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            began = loop.time()
            waiting, self._accepted, self._refused = self._refused + self._accepted, [], []
            deltas: list[Delta] = []
            for group in itertools.chain([waiting], groups):
                if group:
                    group = group if self._is_answered else [_checked(delta) for delta in group]
                    self._publisher.start(group, self._generated())
                    deltas += group
            finished = self._take_finished(live_only)
            if deltas or finished:
                self._is_answered = False
                lost = await loop.run_in_executor(self._thread, self._send, deltas, finished)
                if lost is None:
                    return
                self._is_answered = not self._refused
                self._on_ended([(item.key, item.fence) for item in finished])
                if lost:
                    self._on_lost(lost)
            self._rest(began, loop.time())
            self._last = self._last if live_only else loop.time()

    def _results_seconds(self) -> float:
        return max(COALESCE_SECONDS, self._backlog_seconds if self.results_may_wait() else 0.0)

    def _accept_late(self, lease: Held, delta: Delta) -> None:
        self._acceptances.pop(lease, None)  # None if a restored Redis dispatched the request again
        self.accept(delta)

    def _take_finished(self, live_only: bool) -> list[Finished]:
        taken = [item for item in self._finished if item.key.live] if live_only else self._finished
        self._finished = [item for item in self._finished if not item.key.live] if live_only else []
        return taken

    def _rest(self, began: float, ended: float) -> None:
        """Pause as long as this delivery took, so that Redis and the API can serve others."""
        self._next = max(began + _SHORTEST_INTERVAL, ended + min(ended - began, COALESCE_SECONDS))

    def close(self) -> None:
        """Discard undelivered data; nothing more is sent."""
        self._closed.set()
        for timer in (self._timer, *self._acceptances.values()):
            if timer is not None:
                timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, deltas: list[Delta], finished: list[Finished]) -> list[Held] | None:
        """Return the leases that turned out to be lost, or None if closed before Redis answered."""
        while not self._closed.is_set():
            generated = self._generated()
            try:
                try:
                    lost = set(self._publisher.finish(deltas, generated)) if deltas else set()
                except QueueFull as error:
                    self._outage.failed(error)
                    finished, self._refused = with_their_tokens(finished, deltas)
                    deltas, lost = [], set()
                if finished:
                    self._queue.commit(self._worker, finished, generated)
                    logger.debug("committed %d results", len(finished))
            except QueueUnavailable as error:
                self._outage.failed(error)
                self._closed.wait(_PAUSE_AFTER_ERROR)
                continue
            if not self._refused:
                self._outage.worked()
            return [(delta.key, delta.fence) for delta in deltas if delta.key in lost]
        return None

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


def _checked(delta: Delta) -> Delta:
    """Return a delta marked for a check by Redis that it does not have the tokens yet."""
    return msgspec.structs.replace(delta, continues=False) if delta.continues else delta


def with_their_tokens(finished: list[Finished], deltas: list[Delta]) -> tuple[list[Finished], list[Delta]]:
    """Return results with all tokens of their requests, and the deltas of the other requests."""
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
