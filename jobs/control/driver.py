"""Driver: the batches that one process validates, advances and finalizes.

A job of RQ makes a process take batches; their records name it from then on. The process runs
slices of the batch's jobs, each in a thread of its own, whenever a claim or a commit asks for one,
and looks after all its batches each second. Its key in Redis says that it is alive: when that has
gone, the ticker hands its batches to another process.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import redis

from jobs.control.advance import needs_slice
from jobs.control.runner import Next, Runner
from jobs.control.slices import BEAT_SECONDS
from jobs.control.turns import Turns
from jobs.protocol.states import JOBS
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import FIRST_ID
from jobs.queue.tasks import hand_out, take_batches

ALIVE_SECONDS = 4
"""The driver's key lasts this long beyond its last heartbeat."""
MOST_SLICES = 64
MOST_OF_TENANT = 16
"""Slices at once, in all and of one tenant: more than compute, since many may wait for disks."""

_TAKEN_AT_ONCE = 16
_LOOK_SECONDS = 1.0
_GATHER_SECONDS = 0.004  # between two reads of what asks for slices
_STOP_SECONDS = 5.0
_AWAY = (redis.RedisError, QueueUnavailable)
logger = logging.getLogger(__name__)


@dataclass
class _Driven:
    batch: str
    tenant: str
    wanted: bool = False  # a slice is to run, or to run again
    running: bool = False


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
        self._waiting: dict[str, deque[_Driven]] = {}  # by tenant, in the order in which they asked
        self._running: dict[str, int] = {}  # slices by tenant
        self._last_id = FIRST_ID

    def start(self) -> None:
        """Begin to send heartbeats, and to listen to what asks for slices."""
        for body in (self._beat, self._listen):
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
            with self._changed:
                self._ask_for_slice(self._batches.setdefault(batch, _Driven(batch, fields.tenant)))

    def _name_driver(self, batch: str, fields: BatchFields, driver: str) -> bool:
        return self.queue.transition(batch, [fields.state], fields.state, {"driver": driver}, fields.generation)

    def _ask_for_slice(self, driven: _Driven) -> None:
        """Run a slice as soon as the tenant's others leave room for it; `_changed` is held."""
        if not driven.wanted and not driven.running:
            self._waiting.setdefault(driven.tenant, deque()).append(driven)
        driven.wanted = True
        self._begin_slices()

    def _begin_slices(self) -> None:
        while not self.stopping.is_set() and sum(self._running.values()) < MOST_SLICES:
            able = [tenant for tenant in self._waiting if self._running.get(tenant, 0) < MOST_OF_TENANT]
            if not able:
                return
            tenant = min(able, key=self._turns.served)
            driven = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            driven.wanted, driven.running = False, True
            self._running[tenant] = self._running.get(tenant, 0) + 1
            threading.Thread(target=self._run_slice, args=(driven,), name=driven.batch, daemon=True).start()

    def _run_slice(self, driven: _Driven) -> None:
        turn = self._turns.take(driven.tenant, driven.batch)
        following: Next = "wait"
        try:
            following = self._runner.run(driven.batch, lambda: self._turns.pass_on(turn))
        finally:
            self._turns.end(turn)
            with self._changed:
                self._end_slice(driven, following)

    def _end_slice(self, driven: _Driven, following: Next) -> None:
        driven.running = False
        self._running[driven.tenant] -= 1
        if not self._running[driven.tenant]:
            del self._running[driven.tenant]
        if driven.wanted or following == "again":
            driven.wanted = False
            self._ask_for_slice(driven)
        elif following == "drop":
            del self._batches[driven.batch]
        self._begin_slices()
        self._changed.notify_all()

    def _beat(self) -> None:
        while True:
            try:
                self.queue.redis.set(keys.driver(self.name), 1, ex=ALIVE_SECONDS)
                self._runner.send_heartbeats()
            except _AWAY as error:
                logger.debug("Redis unavailable; the next heartbeat follows: %s", error)
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        """Run slices as claims and commits ask for them, and where one is needed that nothing asked
        for: Redis may lose that.
        """
        look_at = 0.0
        while True:
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
            idle = [driven.batch for driven in self._batches.values() if not driven.running]
        for batch, fields in self.queue.statuses(idle).items():
            if fields.driver != self.name or fields.state != "in_progress" or needs_slice(self.queue, batch, fields):
                self._wake([batch])
