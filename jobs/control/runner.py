"""Run the control plane's jobs in one process, and what a failure of one leads to."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from jobs.batch.ending import begin_cancel
from jobs.batch.input_files import InputError
from jobs.batch.lost import end_if_lost
from jobs.batch.manifest import is_marked_cancelled
from jobs.control.advance import advance, drain_all
from jobs.control.finalize import finalize
from jobs.control.served_time import ServedTime
from jobs.control.slices import BEAT_SECONDS, Slice, Stopping, Superseded, hold
from jobs.control.slots import Slots, are_long
from jobs.control.validate import validate
from jobs.protocol.states import CANCELLABLE, END_STATES, JOBS, JobName, states_of
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.tasks import job_id
from jobs.store.storage import Busy, StoreError

WORK: dict[JobName, Callable[[Slice], None]] = {"validate": validate, "advance": advance, "finalize": finalize}

_PATIENCE_SECONDS = 2 * BEAT_SECONDS  # in which a job that lost its batch releases the folder
logger = logging.getLogger(__name__)


class Runner:
    """Runs slices of `advance` one after the other, and the other jobs, which take long, side by
    side in the `slots`: so a small batch does not wait for a large one to be read or written.
    Without slots `run` returns when the job has ended.
    """

    def __init__(self, queue: Queue, slots: Slots | None = None) -> None:
        self.queue = queue
        self.slots = slots
        self.served = ServedTime()
        self.stopping = threading.Event()
        """Set when the process was ordered to end."""

    def run(self, job: JobName, batch: str, generation: int) -> None:
        """Run a job on a batch, in the states that ask for it.

        RQ takes one in a thread for done when it has begun, which is at once; the batch's heartbeat
        says that it is alive.
        """
        if job == "advance" or self.slots is None:
            began = time.monotonic()
            self._run(job, batch, generation, WORK[job])
            self.served.add(batch, time.monotonic() - began)
        else:
            name = job_id(job, batch, generation)
            self.slots.take(name, are_long(self.queue, [batch])[0])
            threading.Thread(target=self._run_in_thread, name=name, args=(self.slots, job, batch, generation)).start()

    def flush(self) -> None:
        """Drain every running batch that no other process works on.

        Raises what Redis raises, at once where it does not answer.
        """
        active: Any = self.queue.redis.smembers(keys.ACTIVE)
        for batch in sorted(map(bytes.decode, active)):
            self._run("advance", batch, self.queue.batch_fields(batch).generation, drain_all)

    def _run_in_thread(self, slots: Slots, job: JobName, batch: str, generation: int) -> None:
        try:
            self._run(job, batch, generation, WORK[job])
        finally:
            slots.release(threading.current_thread().name)

    def _run(self, job: JobName, batch: str, generation: int, work: Callable[[Slice], None]) -> None:
        """Run `work` under `hold`, in the states of the job.

        A failure that a person can mend becomes the record's `problem`; the ticker has the job run
        again. It raises nothing, so that RQ takes the job for done and never keeps a failed one,
        whose id would bar the next.
        """
        states, patience = states_of(job), 0.0 if job == "advance" else _PATIENCE_SECONDS
        try:
            with hold(self.queue, batch, generation, states, self.stopping, patience) as held:
                _work_on(held, work)
        except (Superseded, Stopping, Busy):
            logger.debug("batch %s: another process works on it, or this one stops", batch)
        except (QueueUnavailable, redis.RedisError) as error:
            logger.warning("batch %s: Redis unavailable; the ticker runs the job again: %s", batch, error)
        except (StoreError, InputError) as error:
            logger.error("batch %s: %s", batch, error)
            self._note_problem(batch, str(error))
        except Exception as error:
            logger.exception("batch %s: internal error", batch)
            self._note_problem(batch, f"internal error: {error!r}")

    def _note_problem(self, batch: str, problem: str) -> None:
        """Show in the record why the batch makes no progress, or end it if it never will."""
        try:
            if (state := self.queue.batch_fields(batch).state) in JOBS:
                self.queue.transition(batch, [state], state, {"problem": problem})
                end_if_lost(self.queue, batch)
        except (QueueUnavailable, redis.RedisError) as error:
            logger.warning("batch %s: Redis unavailable; its problem is not recorded: %s", batch, error)


def _work_on(held: Slice, work: Callable[[Slice], None]) -> None:
    if held.manifest.state in END_STATES:
        held.end_again()
    elif held.state in CANCELLABLE and is_marked_cancelled(held.root):  # Redis lost that, or never got it
        begin_cancel(held.queue, held.batch, held.generation)
        return
    else:
        work(held)
    if held.fields.problem:
        held.note({"problem": ""})
