"""`python -m jobs.control.rq_worker --queue advance|bulk [--redis-url URL]`: runs the control
plane's jobs of one queue.

Slices of `advance` run one after the other; the long jobs of `bulk` run side by side in threads,
and wait in Redis while there is no slot for them.

The jobs run in this process: they are our own code, keep no state that matters, and a kill at any
point is recovered by the ticker. One queue per process keeps RQ's pop atomic. What RQ itself knows
about workers and jobs is for show; nothing rests on it.
"""

import argparse
import contextlib
import logging
import math
import signal
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import redis
from rq import Queue as JobQueue
from rq import SimpleWorker
from rq.exceptions import InvalidJobOperation, NoSuchJobError, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from jobs.control.runner import WORK, Runner
from jobs.control.slots import Slots, are_long
from jobs.errors import JobsError
from jobs.process import add_redis_url, configure_logs, die_with_parent
from jobs.protocol.states import JobName
from jobs.queue.connection import check_server, connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.tasks import batch_of, function_name
from jobs.server import ServerError

_WORKER_TTL = 25  # seconds; RQ blocks for 15 less
_BEAT_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_SLOT_SECONDS = 0.1
_SWITCH_SECONDS = 0.0005
"""A thread holds Python's lock for no longer: a job that waits for Redis and disks between short
turns gets the lock back after a turn of each long job.
"""
_MOST_SEEN = 1000  # jobs in the queue, of which the first short one is looked for
_NAMES: dict[str | None, JobName] = {function_name(job): job for job in WORK}
logger = logging.getLogger(__name__)


def main() -> None:
    """Run until SIGTERM or SIGINT, through outages of Redis."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.control.rq_worker", description="Runs the jobs of one queue of the control plane."
    )
    parser.add_argument("--queue", choices=("advance", "bulk"), required=True)
    add_redis_url(parser)
    options = parser.parse_args()
    die_with_parent()
    configure_logs(f"jobs-{options.queue}")
    # Its registries complain of killed jobs that have long run again
    logging.getLogger("rq").setLevel(logging.ERROR)
    logging.getLogger("rq.worker").addFilter(_is_news)
    sys.setswitchinterval(_SWITCH_SECONDS)
    runner = Runner(Queue(connect(options.redis_url)), Slots() if options.queue == "bulk" else None)

    def stop(signum: int, frame: FrameType | None) -> Any:
        runner.stopping.set()
        raise _StoppedWhileIdle

    try:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        while not runner.stopping.is_set():
            _serve(options.queue, options.redis_url, runner)
    except (_StoppedWhileIdle, StopRequested):
        logger.info("stopping")
    if options.queue == "advance":
        _flush(runner)


class ControlJob(Job):
    """RQ's job that imports and fetches nothing that Redis names: its function comes from a table,
    and it has no callbacks and no webhooks.
    """

    success_callback = failure_callback = stopped_callback = None
    runner: Runner  # of the worker that runs it

    @property
    def func(self) -> Callable[..., None]:
        """Return the function of that name; for an unknown name one that logs it."""
        job = _NAMES.get(self.func_name)
        return self._drop if job is None else partial(self.runner.run, job)

    def send_webhooks(self, *arguments: Any, **named: Any) -> None:
        """Send none."""

    def _drop(self, *arguments: Any, **options: Any) -> None:
        logger.warning("dropped job %s: this version has no job %s", self.id, self.func_name)


class ControlWorker(SimpleWorker):
    """RQ's worker that forks nothing, with short times and without the parts that cost a connection
    or a thread.
    """

    max_connection_wait_time = 1.0
    log_result_lifespan = False

    def __init__(self, queue: str, client: redis.Redis, runner: Runner) -> None:
        super().__init__(
            [queue],
            name=f"{queue}-{uuid.uuid4().hex}",
            connection=client,
            job_class=ControlJob,
            serializer=JSONSerializer,
            worker_ttl=_WORKER_TTL,
            maintenance_interval=60,
            log_job_description=False,
        )
        self._runner = runner

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, JobQueue] | None:
        """Take a job that can begin at once: of the slices that wait, the least served batch's; of
        the long jobs a short one, wherever it is in the queue, while there are slots for no others.

        One that waited in this process would send no heartbeat, and be taken for dead.
        """
        slots, beat_at = self._runner.slots, -math.inf
        if slots is None and (found := self._take_least_served()):
            return found
        while slots is not None:
            short, long = slots.free()
            if long:
                break
            if self.should_run_maintenance_tasks:
                self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
            if time.monotonic() - beat_at > _BEAT_SECONDS:
                beat_at = time.monotonic()
                self.heartbeat()
            if short and (found := self._take_short()):
                return found
            slots.wait(_SLOT_SECONDS)
        return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)

    def _take_least_served(self) -> tuple[Job, JobQueue] | None:
        """Take the next slice of the batch that had the least of this process' time, if several
        wait: so one that needs little does not wait for each that needs much.
        """
        names, served = self.queues[0].get_job_ids(0, _MOST_SEEN), self._runner.served
        return self._take(min(names, key=lambda name: served.of(batch_of(name)))) if len(names) > 1 else None

    def _take_short(self) -> tuple[Job, JobQueue] | None:
        names = self.queues[0].get_job_ids(0, _MOST_SEEN)
        long = are_long(self._runner.queue, [batch_of(name) for name in names]) if names else []
        short = (name for name, is_long in zip(names, long, strict=True) if not is_long)
        return next(filter(None, map(self._take, short)), None)

    def _take(self, name: str) -> tuple[Job, JobQueue] | None:
        """Take this job out of the queue, unless another process did."""
        queue: JobQueue = self.queues[0]
        if self.connection.lrem(queue.key, 1, name):
            with contextlib.suppress(NoSuchJobError):
                return ControlJob.fetch(name, connection=self.connection, serializer=JSONSerializer), queue
        return None

    def execute_job(self, job: Job, queue: JobQueue) -> None:
        """Run the job in this process."""
        assert isinstance(job, ControlJob), "the worker's `job_class`"
        job.runner = self._runner
        super().execute_job(job, queue)

    def subscribe(self) -> None:
        """No remote commands."""

    def unsubscribe(self) -> None:
        """No remote commands."""

    def procline(self, message: str) -> None:
        """The process keeps its title."""

    def handle_warm_shutdown_request(self) -> None:
        """Long jobs end at their next check."""
        self._runner.stopping.set()

    def handle_job_success(self, job: Job, *arguments: Any, **named: Any) -> None:
        """Remove the last heartbeat of a job that Redis lost while it ran: nothing else would."""
        try:
            super().handle_job_success(job, *arguments, **named)
        except InvalidJobOperation:
            logger.info("Redis lost job %s while it ran", job.id)
            with self.connection.pipeline() as pipeline:
                self.cleanup_execution(job, pipeline=pipeline)
                pipeline.unlink(job.key)
                pipeline.execute()

    @property
    def should_run_maintenance_tasks(self) -> bool:
        """Return what RQ says; raise `StopRequested` once the process is to stop.

        RQ asks before it waits for each job. A signal's exception alone would not do: redis-py's
        destructors drop it.
        """
        if self._runner.stopping.is_set():
            raise StopRequested
        return bool(super().should_run_maintenance_tasks)

    def get_heartbeat_ttl(self, job: Job) -> int:
        """Jobs have no time limit; the worker's entry must not outlive a kill by long."""
        return _WORKER_TTL + 60


class _StoppedWhileIdle(JobsError):
    """The signal came while no job ran."""


def _serve(queue: str, url: str, runner: Runner) -> None:
    """Run RQ's loop once; it ends when Redis is unavailable for longer than a moment."""
    client = connect(url, db=runner.queue.settings.rq_db)
    try:
        check_server(runner.queue.redis)
        ControlWorker(queue, client, runner).work(logging_level="WARNING")
    except (redis.RedisError, QueueUnavailable, ServerError) as error:
        logger.warning("Redis unavailable; this process takes jobs again when it answers: %s", error)
    finally:
        client.close()
    if not runner.stopping.is_set():
        time.sleep(_RETRY_SECONDS)


def _flush(runner: Runner) -> None:
    """Keep what finished, for a Redis that may not come back."""
    runner.stopping.clear()
    try:
        runner.flush()
    except (redis.RedisError, QueueUnavailable) as error:
        logger.warning("Redis unavailable; finished lines stay in Redis: %s", error)


def _is_news(record: logging.LogRecord) -> bool:
    """Drop RQ's traceback for each outage of Redis, which `_serve` logs in one line."""
    return record.exc_info is None or not isinstance(record.exc_info[1], redis.RedisError)


if __name__ == "__main__":
    main()
