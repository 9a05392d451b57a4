"""Driver: the batches that one process validates, advances and finalizes.

A job of RQ makes a process take batches; their records name it from then on. The process runs
slices of the batch's jobs, each in a thread of its own, whenever a claim or a commit asks for one,
and looks after all its batches each second. Its key in Redis says that it is alive: when that has
gone, the ticker hands its batches to another process.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import redis

from jobs.control.advance import needs_slice
from jobs.control.runner import Next, Runner
from jobs.control.slices import BEAT_SECONDS
from jobs.control.turns import Turn, Turns
from jobs.protocol.states import JOBS
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import FIRST_ID
from jobs.queue.tasks import hand_out, take_batches

ALIVE_SECONDS = 5
"""The driver's key lasts this long."""
STUCK_SECONDS = 2.0
"""Without a check for this long, a slice waits for a disk that does not answer."""
MOST_STUCK = 500
LARGE_BYTES = 4 * 1024 * 1024
"""To validate an input of more takes memory, of some 100 bytes a line."""

_TAKEN_AT_ONCE = 16
_LOOK_SECONDS = 1.0
_GATHER_SECONDS = 0.004  # between two reads of what asks for slices
_STOP_SECONDS = 5.0
_AWAY = (redis.RedisError, QueueUnavailable)
logger = logging.getLogger(__name__)


class _Lane(NamedTuple):
    """Slices that share a limit."""

    tenant: str
    is_large: bool


@dataclass(eq=False)
class _Driven:
    batch: str
    lane: _Lane
    wanted: bool = False  # a slice is to run, or to run again
    turn: Turn | None = None  # of the slice that runs

    @property
    def is_stuck(self) -> bool:
        return self.turn is not None and self.turn.unchecked_seconds > STUCK_SECONDS


_MOST = {False: 64, True: 8}
_MOST_OF_TENANT = {False: 16, True: 4}
"""Slices at once, in all and of one tenant: more than compute, since many may wait for disks."""


class Driver:
    """Drives the batches that it takes, in threads that `start` makes."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.name = uuid.uuid4().hex
        self.stopping = threading.Event()
        """Set when the process was ordered to end."""
        self._runner = Runner(queue, self.name, self.stopping)
        self._turns = Turns(self.stopping)
        self._changed = threading.Condition()
        self._batches: dict[str, _Driven] = {}
        self._waiting: dict[_Lane, deque[_Driven]] = {}  # in the order in which they asked
        self._running: set[_Driven] = set()
        self._last_id = FIRST_ID
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to send heartbeats, and to listen to what asks for slices."""
        for body in (self._stay_alive, self._beat, self._listen):
            threading.Thread(target=body, name=body.__name__, daemon=True).start()

    def take_batches(self) -> None:
        """Drive some of the batches that wait from now on."""
        try:
            for batch in take_batches(self.queue, _TAKEN_AT_ONCE):
                self._adopt(batch)
        except _AWAY as error:
            logger.warning("Redis unavailable; the ticker hands out what waits again: %s", error)

    def stop(self) -> None:
        """End the slices, drain what finished, and hand the batches to other processes.

        Raises what Redis raises, at once where it does not answer.
        """
        self.stopping.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, _STOP_SECONDS)
            batches = sorted(self._batches)
            self._ended.set()
        self.queue.redis.ping()
        last = Runner(self.queue, driver=self.name)
        for batch in batches:
            last.drain(batch)
            fields = self.queue.batch_fields(batch)
            if fields.driver == self.name and self._name_driver(batch, fields, ""):
                hand_out(self.queue, batch)
        self.queue.redis.delete(keys.driver(self.name))

    def _adopt(self, batch: str) -> None:
        """Drive a batch unless it has ended, or a process that is alive drives it."""
        fields = self.queue.batch_fields(batch)
        if fields.state not in JOBS:
            return
        if fields.driver not in ("", self.name) and self.queue.redis.exists(keys.driver(fields.driver)):
            return
        if self._name_driver(batch, fields, self.name):
            is_large = fields.state == "validating" and not 0 < fields.input_bytes <= LARGE_BYTES
            with self._changed:
                lane = _Lane(fields.tenant, is_large)
                self._ask_for_slice(self._batches.setdefault(batch, _Driven(batch, lane)))

    def _name_driver(self, batch: str, fields: BatchFields, driver: str) -> bool:
        return self.queue.transition(batch, [fields.state], fields.state, {"driver": driver}, fields.generation)

    def _ask_for_slice(self, driven: _Driven) -> None:
        """Run a slice as soon as the others of its lane leave room for it; `_changed` is held."""
        if not driven.wanted and driven not in self._running:
            self._waiting.setdefault(driven.lane, deque()).append(driven)
        driven.wanted = True
        self._begin_slices()

    def _begin_slices(self) -> None:
        while not self.stopping.is_set() and (able := [lane for lane in self._waiting if self._has_room(lane)]):
            lane = min(able, key=lambda lane: self._turns.served(lane.tenant))
            driven = self._waiting[lane].popleft()
            if not self._waiting[lane]:
                del self._waiting[lane]
            driven.wanted, driven.turn = False, Turn(lane.tenant, driven.batch)
            self._running.add(driven)
            threading.Thread(target=self._run_slice, args=(driven, driven.turn), name=driven.batch, daemon=True).start()

    def _has_room(self, lane: _Lane) -> bool:
        """Stuck slices take no room, until they are too many, but for those of large inputs."""
        may_be_stuck = not lane.is_large and len(self._running) < MOST_STUCK
        others = [
            one for one in self._running if one.lane.is_large == lane.is_large and not (may_be_stuck and one.is_stuck)
        ]
        of_tenant = sum(one.lane == lane for one in others)
        return len(others) < _MOST[lane.is_large] and of_tenant < _MOST_OF_TENANT[lane.is_large]

    def _run_slice(self, driven: _Driven, turn: Turn) -> None:
        following: Next = "wait"
        try:
            self._turns.take(turn)
            following = self._runner.run(driven.batch, lambda: self._turns.pass_on(turn))
        finally:
            self._turns.end(turn)
            with self._changed:
                self._end_slice(driven, following)

    def _end_slice(self, driven: _Driven, following: Next) -> None:
        self._running.remove(driven)
        driven.turn = None
        if following == "again":  # it is validated
            driven.lane = driven.lane._replace(is_large=False)
        if driven.wanted or following == "again":
            driven.wanted = False
            self._ask_for_slice(driven)
        elif following == "drop":
            del self._batches[driven.batch]
        self._begin_slices()
        self._changed.notify_all()

    def _stay_alive(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(*_AWAY):
                self.queue.redis.set(keys.driver(self.name), 1, ex=ALIVE_SECONDS)
            self._ended.wait(BEAT_SECONDS)

    def _beat(self) -> None:
        """Send heartbeats of slices, by which versions before this one see that they live."""
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(*_AWAY):
                self._runner.send_heartbeats()

    def _listen(self) -> None:
        """Run slices as claims and commits ask for them, and where one is needed that nothing asked
        for: Redis may lose that.
        """
        look_at = 0.0
        while not self._ended.is_set():
            try:
                left = max(0.0, look_at - time.monotonic())
                self._wake(self._messages(left) if left else ())
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_SECONDS
                    self._look_after_all()
            except _AWAY as error:
                logger.debug("Redis unavailable; batches go on when it answers: %s", error)
                time.sleep(_LOOK_SECONDS / 2)

    def _messages(self, seconds: float) -> set[str]:
        """Wait for batches that ask for a slice."""
        messages = self.queue.control_messages(keys.JOBS_CONTROL, self._last_id, seconds)
        if messages:
            self._last_id = messages[-1].id
            time.sleep(_GATHER_SECONDS)
        return {message.batch for message in messages if message.kind == "batch"}

    def _wake(self, batches: Iterable[str]) -> None:
        with self._changed:
            for batch in batches:
                if (driven := self._batches.get(batch)) is not None:
                    self._ask_for_slice(driven)

    def _look_after_all(self) -> None:
        with self._changed:
            idle = [driven.batch for driven in self._batches.values() if driven not in self._running]
            self._begin_slices()  # one that runs may be stuck now
        for batch, fields in self.queue.statuses(idle).items():
            if fields.driver != self.name or fields.state != "in_progress" or needs_slice(self.queue, batch, fields):
                self._wake([batch])
