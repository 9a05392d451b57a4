"""Driver: the batches that one process validates, advances and finalizes.

An RQ job makes a process take batches; their records then name it. The process runs slices of the
batch's jobs, each in a thread of its own, whenever a claim or a commit asks for one; it also reads
records each second, for missed requests (`rounds`). Its key in Redis shows that it is alive: once
the key expires, the ticker gives its batches to another process.
"""

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable

import redis

from jobs.control.advance import needs_slice
from jobs.control.rounds import Rounds
from jobs.control.runner import Next, Runner
from jobs.control.slice_queue import Driven, SliceQueue
from jobs.control.slices import BEAT_SECONDS
from jobs.control.turns import Turn, Turns
from jobs.protocol.states import JOBS
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields, BatchStatus
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import FIRST_ID
from jobs.queue.tasks import hand_out, take_batches

ALIVE_SECONDS = 5
"""Lifetime of the driver's key."""
LARGE_BYTES = 4 * 1024 * 1024
"""Validating a larger input needs memory, about 100 bytes per line."""

_TAKEN_AT_ONCE = 16
_LOOK_SECONDS = 1.0
_LOOK_BATCHES = 100
_GATHER_SECONDS = 0.004  # between two reads of requests for slices
_LONGEST_PAUSE_SECONDS = 8.0  # after consecutive failures
_STOP_SECONDS = 5.0  # for slices to end, and again for drains
_HUNG_SECONDS = 60.0  # without progress, after which this process counts as dead
_REDIS_ERRORS = (redis.RedisError, QueueUnavailable)
logger = logging.getLogger(__name__)


class Driver:
    """Drives the batches that it takes, in threads that `start` creates."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.name = uuid.uuid4().hex
        self.stopping = threading.Event()
        """Set when the process was ordered to end."""
        self.outage = OutageLog(logger, "batches wait until it answers", "batches go on")
        self._runner = Runner(queue, self.name, self.stopping, self.outage)
        self._turns = Turns(self.stopping)
        self._changed = threading.Condition()
        self._batches: dict[str, Driven] = {}
        self._slices = SliceQueue(self._turns.served)
        self._last_id = FIRST_ID
        self._look_at = 0.0  # monotonic seconds
        self._rounds = Rounds(queue, _LOOK_BATCHES)
        self._ended = threading.Event()

    def start(self) -> None:
        """Register this process as alive, and listen for requests for slices."""
        self._look_at = time.monotonic()
        bodies = (self._stay_alive, self._check_records, self._listen)
        for body in (*(self._repeated(body) for body in bodies), self._turns.watch):
            threading.Thread(target=body, daemon=True).start()

    def take_batches(self) -> None:
        """Drive some of the waiting batches from now on.

        None are taken once the process stops: the ticker dispatches batches again that were taken
        and are not driven.
        """
        try:
            batches = [] if self.stopping.is_set() else take_batches(self.queue, _TAKEN_AT_ONCE)
        except _REDIS_ERRORS as error:
            self.outage.failed(error)
            return
        for batch in batches:
            if self.stopping.is_set():
                return
            try:
                self._adopt(batch)
            except _REDIS_ERRORS as error:
                self.outage.failed(error)
            except Exception:
                logger.exception("batch %s: internal error; the batch will be dispatched again", batch)

    def stop(self) -> None:
        """End the slices, drain finished results, and hand the batches to other processes.

        Raise what redis-py raises, at once if Redis does not answer.
        """
        self.stopping.set()
        self._turns.grant()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._slices.running, _STOP_SECONDS)
                stuck = {driven.batch for driven in self._slices.running}
            self.queue.redis.ping()
            drains = threading.Thread(target=self._drain, args=(sorted(self._batches.keys() - stuck),), daemon=True)
            drains.start()
            drains.join(_STOP_SECONDS)
            for batch in sorted(self._batches):
                self._hand_over(batch)
            self.queue.redis.delete(keys.driver(self.name))
        finally:
            self._ended.set()
            with self._changed:
                self._changed.notify_all()

    def _adopt(self, batch: str) -> None:
        """Drive a batch unless it has ended, or another live process drives it."""
        fields = self.queue.batch_fields(batch)
        if fields.state not in JOBS:
            return
        if fields.driver not in ("", self.name) and self.queue.redis.exists(keys.driver(fields.driver)):
            return
        if self._name_driver(batch, fields, self.name):
            with self._changed:
                driven = self._batches.setdefault(batch, Driven(batch, fields.tenant, is_large(fields)))
                self._slices.ask_for(driven)
                self._begin_slices()

    def _name_driver(self, batch: str, fields: BatchFields, driver: str) -> bool:
        return self.queue.transition(batch, [fields.state], fields.state, {"driver": driver}, fields.generation)

    def _drain(self, batches: list[str]) -> None:
        last = Runner(self.queue, self.name)
        with contextlib.suppress(*_REDIS_ERRORS):
            for batch, fields in self.queue.statuses(batches).items():
                if fields.result_bytes:
                    last.drain(batch)

    def _hand_over(self, batch: str) -> None:
        fields = self.queue.batch_fields(batch)
        if fields.driver == self.name and self._name_driver(batch, fields, ""):
            hand_out(self.queue, batch)

    def _begin_slices(self) -> None:
        while not self.stopping.is_set() and (driven := self._slices.begin_next()) is not None:
            turn = driven.turn = Turn(driven.tenant, driven.batch)
            try:
                threading.Thread(target=self._run_slice, args=(driven, turn), name=driven.batch, daemon=True).start()
            except RuntimeError as error:
                logger.error("batch %s: failed to start a thread for a slice; retrying later: %s", driven.batch, error)
                self._slices.end(driven)
                return
            self._changed.notify_all()

    def _run_slice(self, driven: Driven, turn: Turn) -> None:
        following: Next = "retry"
        try:
            self._turns.take(turn)
            following = self._runner.run(driven.batch, lambda: self._turns.pass_on(turn))
        finally:
            self._turns.end(turn)
            with self._changed:
                self._end_slice(driven, following)

    def _end_slice(self, driven: Driven, following: Next) -> None:
        driven.pause = min(max(_LOOK_SECONDS, 2 * driven.pause), _LONGEST_PAUSE_SECONDS) if following == "retry" else 0
        driven.not_before = time.monotonic() + driven.pause  # set before the batch is free for the next look
        self._slices.end(driven)
        if following in ("again", "validated") and driven.is_large:
            self._slices.make_small(driven)
        if driven.is_wanted or following == "again":
            self._slices.ask_for(driven)
        elif following == "drop":
            del self._batches[driven.batch]
        self._begin_slices()
        self._changed.notify_all()

    def _repeated(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `body` until the process ends, whatever it raises."""

        def run() -> None:
            while not self._ended.is_set():
                try:
                    body()
                except _REDIS_ERRORS as error:
                    logger.debug("Redis unavailable; batches resume when it answers: %s", error)
                    self._ended.wait(_LOOK_SECONDS / 2)
                except Exception:
                    logger.exception("internal error; batches resume after a pause")
                    self._ended.wait(_LOOK_SECONDS)

        return run

    def _stay_alive(self) -> None:
        is_hung = time.monotonic() - self._look_at > _HUNG_SECONDS
        for name in () if is_hung else (keys.driver(self.name), keys.driver_host(socket.gethostname())):
            # A full server creates no key, but can extend one.
            if not self.queue.redis.expire(name, ALIVE_SECONDS):
                self.queue.redis.set(name, 1, ex=ALIVE_SECONDS)
        self._ended.wait(BEAT_SECONDS)

    def _check_records(self) -> None:
        """End slices of superseded batches, for example after a cancellation."""
        with self._changed:
            self._changed.wait_for(lambda: self._slices.running or self._ended.is_set())
        self._ended.wait(BEAT_SECONDS)
        self._runner.check_records()

    def _listen(self) -> None:
        """Run slices as claims and commits ask for them, and wherever a request for one was
        lost.
        """
        left = self._look_at - time.monotonic()
        if left > 0:
            self._ask_for(self._messages(left))
        else:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._look_after_all()

    def _messages(self, seconds: float) -> set[str]:
        """Wait for batches that request a slice."""
        messages = self.queue.control_messages(keys.JOBS_CONTROL, self._last_id, seconds)
        if messages:
            self._last_id = messages[-1].id
            time.sleep(_GATHER_SECONDS)
        return {message.batch for message in messages if message.kind == "batch"}

    def _ask_for(self, batches: Iterable[str]) -> None:
        with self._changed:
            for batch in batches:
                if (driven := self._batches.get(batch)) is not None:
                    self._slices.ask_for(driven)
            self._begin_slices()

    def _look_after_all(self) -> None:
        now = time.monotonic()
        with self._changed:
            for driven in self._slices.note_stuck():
                self._turns.count(driven.tenant, now - driven.turn.began if driven.turn else 0.0)
            known = dict(self._batches)
        look = self._rounds.look(set(known))  # read afterwards: these batches' records name this process
        for batch, fields in look.records.items():
            if fields.driver == self.name and fields.state in JOBS and batch not in self._batches:
                self._adopt(batch)  # Redis lost data, or its reply was lost
        failed = [one.batch for one in known.values() if one.pause and one.batch not in look.records]
        records = {**look.records, **self.queue.statuses(failed[:_LOOK_BATCHES])}
        looked = [known[batch] for batch in (*records, *look.gone) if batch in known]
        due = [driven for driven in looked if driven.not_before <= now and not driven.turn]
        self._ask_for([driven.batch for driven in due if self._is_due(driven, records.get(driven.batch))])

    def _is_due(self, driven: Driven, fields: BatchStatus | None) -> bool:
        state = "" if fields is None or fields.driver != self.name else fields.state
        with self._changed:
            if driven.is_large and state != "validating" and driven not in self._slices.running:
                self._slices.make_small(driven)
        return fields is None or state != "in_progress" or needs_slice(self.queue, driven.batch, fields)


def is_large(fields: BatchFields) -> bool:
    """Return whether the batch still has to be validated, with an input of large or unknown
    size.
    """
    return fields.state == "validating" and not fields.open and not 0 < fields.input_bytes <= LARGE_BYTES
