"""Claim requests from Redis: as many as the engine can soon use and no more, so that other workers
get work too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from functools import partial
from typing import Any

from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING
from jobs.protocol.requests import Claim, Finished
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.scripts import MAX_ITEMS
from workers.replica.leases import Leases
from workers.replica.prepared import Prepare, Prepared
from workers.replica.running import Load
from workers.replica.tokenization import Tokenization
from workers.replica.tracing import RequestTraces

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between claims of an idle worker without a notification."""

_PAUSE_AFTER_ERROR = 0.5
_PAUSE_WITHOUT_ROOM = 0.005  # each live call that comes wakes the worker
_SHORT_BYTES = 2048  # most bytes of request bodies for preparation in the event loop
_FEW_QUOTES = 40  # most quotes in these: two for each text
_OF_SINGLE_TEXTS = {EMBEDDINGS, CLASSIFY, POOLING}
_FIRST_CLAIM = 16  # requests; at least the size of a quarantine group
_MOST_BESIDE = 4096  # most requests outside the engine: copies, and results not yet stored in Redis
_OTHERS = 16  # most live calls of tenants below their share in one claim without room
_STEPS_AHEAD = 16  # steps that claimed pooling inputs may fill; the rest is left to other workers


class IntakeState(Enum):
    """The condition for the next claim."""

    WOKEN = auto()  # there may be work; claim when a live call fits
    BACKLOG = auto()  # the last claim was full; claim when several batch requests fit
    EMPTY = auto()  # the last claim emptied the queue; claim when woken
    UNAVAILABLE = auto()  # Redis did not answer; claim again after a pause
    CLAIMING = auto()  # the claim's result sets the next state, unless a method changes it first
    ISOLATED = auto()  # the claim returned quarantined requests, which run alone
    PAUSED = auto()  # claim nothing until `resume`


class Intake:
    """Claim requests and prepare them.

    The next claim is made when enough room is free, or when a control message from Redis wakes it.
    Without room it then claims live calls of tenants that have less than their share here: the
    engine takes slots back for them.
    """

    def __init__(
        self,
        queue: Queue,
        worker: str,
        models: list[str],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        leases: Leases,
        prepare: Prepare,
        tokenization: Tokenization,
        load: Callable[[], Load],
        traces: RequestTraces | None = None,
    ) -> None:
        """Create the intake.

        `prepare` turns claims into requests, in a thread unless they are short; `load` returns the
        engine's load.
        """
        self._queue = queue
        self._worker = worker
        self._models = models
        self._max_num_seqs = max_num_seqs
        self._step_tokens = max_num_batched_tokens
        self._leases = leases
        self._prepare = prepare
        self._tokenization = tokenization
        self._load = load
        self._traces = traces
        self._outage = OutageLog(logger, "not claiming requests", "claiming requests")
        self._state = IntakeState.WOKEN
        self.has_backlog = False  # whether the last claim of batch lines was full
        self._woken = True  # there may be live calls of a tenant below its share
        self._changed = asyncio.Event()
        self._claiming = asyncio.Lock()  # held until claimed requests have been passed on
        # Increases over the life of the worker's id, also after failed claims
        self._seq = time.time_ns() // 1000
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")

    async def run(self, start: Callable[[list[Prepared], list[Finished]], None]) -> None:
        """Claim until cancelled; `start` gets prepared requests and results of those that cannot
        run.
        """
        while True:
            self._changed.clear()
            load = self._load()
            if not self._wants_more(load):
                await self._wait()
                continue
            async with self._claiming:
                await self._take(load, start)
            if self._state is IntakeState.UNAVAILABLE:
                await asyncio.sleep(_PAUSE_AFTER_ERROR)
            elif free_places(load, self._max_num_seqs, self._max_num_seqs)[1] <= 0:
                await asyncio.sleep(_PAUSE_WITHOUT_ROOM)

    @property
    def isolated(self) -> bool:
        """Return whether the last claim returned quarantined requests, which run alone."""
        return self._state is IntakeState.ISOLATED

    def wake(self) -> None:
        """Note that there may be work."""
        self._woken = True
        self._change(IntakeState.WOKEN, IntakeState.BACKLOG, IntakeState.EMPTY, IntakeState.CLAIMING)

    def room_made(self) -> None:
        """Note that requests have ended."""
        if self._state in (IntakeState.WOKEN, IntakeState.BACKLOG):
            self._changed.set()

    def end_isolation(self) -> None:
        """Resume claiming; no quarantined request is left on this worker."""
        self._change(IntakeState.WOKEN, IntakeState.ISOLATED)

    async def pause(self) -> None:
        """Stop claiming until `resume`; return once claimed requests have been passed on."""
        self._change(IntakeState.PAUSED, *set(IntakeState) - {IntakeState.ISOLATED})
        async with self._claiming:
            pass

    def resume(self) -> None:
        self._change(IntakeState.WOKEN, IntakeState.PAUSED)

    def close(self) -> None:
        """Stop waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._tokenization.close()

    def _change(self, state: IntakeState, *sources: IntakeState) -> None:
        """Enter `state` from one of `sources`; do nothing in any other state."""
        if self._state in sources:
            self._state = state
            self._changed.set()

    def _wants_more(self, load: Load) -> bool:
        slots = batch_slots(load, self._max_num_seqs, self._step_tokens)
        batch, live = free_places(load, self._max_num_seqs, slots)
        batch = min(batch, self._room_beside(load))
        if self._state in (IntakeState.WOKEN, IntakeState.UNAVAILABLE):
            return live > 0 or self._woken
        return self._state is IntakeState.BACKLOG and max(batch, live) >= max(1, slots // 16)

    async def _take(self, load: Load, start: Callable[[list[Prepared], list[Finished]], None]) -> None:
        """Claim once and pass the requests on."""
        self._state = IntakeState.CLAIMING
        slots = batch_slots(load, self._max_num_seqs, self._step_tokens)
        room, live_room = (requests_for(places, load) for places in free_places(load, self._max_num_seqs, slots))
        room = max(0, min(room, self._room_beside(load)))
        beyond = _OTHERS if self._woken else 0
        self._woken = False
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        try:
            claims = await in_thread(self._claim, room, live_room, beyond, served(load, self._max_num_seqs))
        except QueueUnavailable as error:
            self._woken = True
            self._outage.failed(error)
            self._change(IntakeState.UNAVAILABLE, IntakeState.CLAIMING, IntakeState.WOKEN)
            return
        self._outage.worked()
        self._seq += 1
        if room:
            self.has_backlog = sum(not claim.live for claim in claims) >= min(room, MAX_ITEMS)
        if any(claim.engine_crashes for claim in claims):
            self._change(IntakeState.ISOLATED, *IntakeState)
        elif room and len(claims) < min(room, MAX_ITEMS):
            self._change(IntakeState.EMPTY, IntakeState.CLAIMING)
        else:
            self._change(IntakeState.BACKLOG, IntakeState.CLAIMING)
        if beyond and sum(claim.live for claim in claims) > live_room:
            self.wake()  # these tenants may have more
        if claims:
            logger.debug("claimed %d requests", len(claims))
            self._leases.add((claim.key, claim.fence) for claim in claims)
            others = self._tokenization.take(claims)
            found = self._prepare(others) if is_short(others) else await in_thread(self._prepare, others)
            start(*self._without_lost(others, *found))

    def _without_lost(
        self, claims: list[Claim], prepared: list[Prepared], errors: list[Finished]
    ) -> tuple[list[Prepared], list[Finished]]:
        """Drop requests that were cancelled, or whose leases were lost, during preparation: another
        worker may hold them now.
        """
        lost = {claim.key: claim for claim in claims if not self._leases.holds((claim.key, claim.fence))}
        if not lost:
            return prepared, errors
        logger.info("dropped %d requests: cancelled, or their leases lost, while they were prepared", len(lost))
        if self._traces is not None:
            for claim in lost.values():
                self._traces.dropped(claim, "cancelled or lost")
        held = [item for item in prepared if item.claim.key not in lost]
        return held, [finished for finished in errors if finished.key not in lost]

    def _room_beside(self, load: Load) -> int:
        """Return how many more requests may wait on this worker outside the engine."""
        return _MOST_BESIDE - (self._leases.count() - load.requests)

    def _claim(self, room: int, live_room: int, beyond: int, served: list[str]) -> list[Claim]:
        """Claim from Redis. After an outage the same claim number is repeated."""
        limits: dict[str, Any] = {"live_limit": live_room, "beyond": beyond, "served": served}
        return self._queue.claim(self._worker, self._seq, room, models=self._models, **limits)

    async def _wait(self) -> None:
        try:
            # Python 3.11's wait_for may lose a cancellation that comes with the event
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            self.wake()


def is_short(claims: Sequence[Claim]) -> bool:
    """Return whether preparation in the event loop is faster than in a thread.

    This is so for a few short pooling texts, which need no template, no grammar and no pairing.
    """
    bodies = [claim.request.body for claim in claims if claim.request.endpoint in _OF_SINGLE_TEXTS]
    return (
        len(bodies) == len(claims)
        and sum(map(len, bodies)) <= _SHORT_BYTES
        and sum(body.count(b'"') for body in bodies) <= _FEW_QUOTES
    )


def batch_slots(load: Load, max_num_seqs: int, step_tokens: int) -> int:
    """Return how many slots batch requests may take.

    For pooling texts, these are the slots that a few steps fill, estimated from the lengths of the
    texts in flight.
    """
    if not load.pooled_tokens:
        return max_num_seqs
    ahead = _STEPS_AHEAD * step_tokens * (load.batch + load.live) // load.pooled_tokens
    return min(max_num_seqs, max(_FIRST_CLAIM, ahead))


def free_places(load: Load, max_num_seqs: int, slots: int) -> tuple[int, int]:
    """Return how many more choices a worker takes, of batch requests (which may take `slots`) and
    of live calls.

    Both share the slots and an eighth more; live calls have as many places beside them as the
    engine has slots. Requests with many choices may exceed their places, but not take those of live
    calls.
    """
    room, most = (count + max(2, count // 8) for count in (slots, max_num_seqs))
    return room - load.batch - load.live, most + max_num_seqs - min(load.batch, most) - load.live_places


def served(load: Load, max_num_seqs: int) -> list[str]:
    """Return the marks of the tenants that have their share of the slots, beside one more."""
    share = max_num_seqs / (len(load.tenants) + 1)
    return [mark for mark, places in load.tenants.items() if places >= share]


def requests_for(places: int, load: Load) -> int:
    """Return how many requests fill this many places.

    The estimate uses the choices of the requests in flight; without any it is a small number.
    """
    if places <= 0:
        return 0
    return max(1, places * load.requests // (load.batch + load.live)) if load.requests else min(places, _FIRST_CLAIM)
