"""Running one slice of a batch's job, and handling its failures."""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

import redis

from jobs.batch.ending import begin_cancel
from jobs.batch.input_files import InputError
from jobs.batch.lost import end_if_lost
from jobs.batch.manifest import Superseded, is_marked_cancelled
from jobs.control.advance import advance, drain_all, needs_slice
from jobs.control.finalize import finalize
from jobs.control.slices import BEAT_SECONDS, Slice, Stopping, hold
from jobs.control.validate import validate
from jobs.protocol.states import CANCELLABLE, END_STATES, JOBS, JobName
from jobs.queue import keys
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.store.storage import Busy, StoreError

Next = Literal["again", "wait", "validated", "retry", "drop"]
"""The next slice: at once, when it is requested (also once it is validated), after a pause, or
none.
"""

WORK: dict[JobName, Callable[[Slice], object]] = {"validate": validate, "advance": advance, "finalize": finalize}

_PATIENCE_SECONDS = 2 * BEAT_SECONDS  # within this time a job that lost its batch releases the folder
logger = logging.getLogger(__name__)


class Runner:
    """Runs slices for the process `driver`; without a name, of all batches."""

    def __init__(
        self,
        queue: Queue,
        driver: str | None = None,
        stopping: threading.Event | None = None,
        outage: OutageLog | None = None,
    ) -> None:
        self.queue = queue
        self._outage = outage or OutageLog(logger, "batches wait until it answers", "batches go on")
        self._driver = driver
        self._stopping = stopping or threading.Event()
        self._held: dict[str, Slice] = {}

    def run(self, batch: str, pause: Callable[[], None] = lambda: None) -> Next:
        """Run a slice of the state's job; it calls `pause` at its checks."""
        return self._run(batch, _work_on, pause, _PATIENCE_SECONDS)

    def drain(self, batch: str) -> None:
        """Drain finished results of a running batch, unless another process works on it."""
        self._run(batch, _drain, lambda: None, 0.0)

    def flush(self) -> None:
        """Drain every running batch that no other process works on.

        Raise what redis-py raises, at once if Redis does not answer.
        """
        active: Any = self.queue.redis.smembers(keys.ACTIVE)
        for batch in sorted(map(bytes.decode, active)):
            self.drain(batch)

    def check_records(self) -> None:
        """Make the slices of superseded batches end. Raise what redis-py raises."""
        for held in list(self._held.values()):
            with contextlib.suppress(Superseded):
                held.check_record()

    def _run(self, batch: str, work: Callable[[Slice], object], pause: Callable[[], None], patience: float) -> Next:
        """Run `work` under `hold`.

        A failure that an operator can fix becomes the record's `problem`; the driver runs the job
        again.
        """
        try:
            with hold(self.queue, batch, self._driver, self._stopping, pause, patience) as held:
                began = held.state
                self._held[batch] = held
                more = work(held)
                self._outage.worked()
                if held.state in END_STATES:
                    return "drop"
                if held.state == "in_progress" != began:  # the first lines are there
                    return "again" if needs_slice(self.queue, batch, held.record()) else "validated"
                return "again" if more or held.state != began else "wait"
        except Superseded:
            return self._after_superseded(batch)
        except (Stopping, Busy):
            logger.debug("batch %s: another process works on it, or this process is stopping", batch)
            return "wait"
        except (QueueUnavailable, redis.RedisError) as error:
            self._outage.failed(error)
        except (StoreError, InputError) as error:
            logger.error("batch %s: %s", batch, error)
            self._note_problem(batch, str(error))
        except Exception as error:
            logger.exception("batch %s: internal error", batch)
            self._note_problem(batch, f"internal error: {error!r}")
        finally:
            self._held.pop(batch, None)
        return "retry"

    def _after_superseded(self, batch: str) -> Next:
        with contextlib.suppress(QueueUnavailable, redis.RedisError):
            fields = self.queue.batch_fields(batch)
            if fields.driver != self._driver or fields.state not in JOBS:
                return "drop"
        return "wait"

    def _note_problem(self, batch: str, problem: str) -> None:
        """Store in the record why the batch makes no progress, or end it if it can never
        continue.
        """
        try:
            if (state := self.queue.batch_fields(batch).state) in JOBS:
                self.queue.transition(batch, [state], state, {"problem": problem})
                end_if_lost(self.queue, batch)
        except (QueueUnavailable, redis.RedisError) as error:
            self._outage.failed(error)


def _drain(held: Slice) -> None:
    if held.state == "in_progress":
        drain_all(held)


def _work_on(held: Slice) -> bool:
    """Run the slice; return whether there is more to do at once."""
    if held.manifest.state in END_STATES:
        held.end_again()
        return False
    if held.state in CANCELLABLE and is_marked_cancelled(held.root):  # Redis lost the cancellation, or never got it
        return begin_cancel(held.queue, held.batch, held.generation)
    more = WORK[JOBS[held.state]](held)
    if held.fields.problem:
        held.note({"problem": ""})
    return bool(more)
