"""`python -m jobs.control.rq_worker [--redis-url URL]`: a process that drives batches.

RQ's jobs make it take batches (`driver`); any number of these processes share them. The ticker
recovers from a kill at any point. RQ's own data on workers and jobs is only informative.
"""

import argparse
import logging
import os
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
from rq.exceptions import InvalidJobOperation, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from jobs.control.driver import Driver
from jobs.errors import JobsError
from jobs.process import (
    STOP_SIGNALS,
    add_redis_url,
    configure_logs,
    die_with_parent,
    drop_lost_exits,
    ignore_stop_signals,
    raise_open_files,
)
from jobs.queue.connection import check_server, connect
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.tasks import FUNCTION, QUEUE
from jobs.server import ServerError

_WORKER_TTL = 25  # seconds; RQ blocks for 15 less
_RETRY_SECONDS = 0.5
_SWITCH_SECONDS = 0.0005
"""Longest time that a thread holds Python's lock.

A job that waits for Redis and disks between short turns gets the lock back after one turn of each
computing job.
"""
logger = logging.getLogger(__name__)


def main() -> None:
    """Run until SIGTERM or SIGINT, through outages of Redis."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.control.rq_worker", description="Validates, feeds, drains and finalizes batches."
    )
    add_redis_url(parser)
    options = parser.parse_args()
    die_with_parent()
    configure_logs("jobs")
    raise_open_files()
    # RQ's registries report killed jobs that have long run again.
    logging.getLogger("rq").setLevel(logging.ERROR)
    sys.setswitchinterval(_SWITCH_SECONDS)
    drop_lost_exits(_StoppedWhileIdle, StopRequested)  # `driver.stopping` has the reason
    driver = Driver(Queue(connect(options.redis_url)))
    logging.getLogger("rq.worker").addFilter(partial(_is_news, driver.outage))
    driver.start()  # before the handlers are set: `Thread.start` breaks if one raises in it
    code = 1
    try:
        _run_until_stopped(options.redis_url, driver)
        _stop(driver)
        code = 0
    except Exception:
        logger.exception("internal error; the process exits")
    finally:
        os._exit(code)  # the interpreter would wait for threads, and abort if one returns from native code


def _run_until_stopped(url: str, driver: Driver) -> None:
    def stop(signum: int, frame: FrameType | None) -> Any:
        ignore_stop_signals()
        driver.stopping.set()
        raise _StoppedWhileIdle

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, stop)
        while not driver.stopping.is_set():
            _serve(url, driver)
    except (_StoppedWhileIdle, StopRequested):
        logger.info("stopping")


class ControlJob(Job):
    """An RQ job that imports and fetches nothing that Redis names.

    Its function is `Driver.take_batches`, and it has no callbacks and no webhooks.
    """

    success_callback = failure_callback = stopped_callback = None
    driver: Driver  # set by the worker that runs it

    @property
    def func(self) -> Callable[..., None]:
        """Return the job's function; for an unknown name one that logs it."""
        return self.driver.take_batches if self.func_name == FUNCTION else self._drop

    def send_webhooks(self, *arguments: Any, **named: Any) -> None:
        """Do nothing."""

    def _drop(self, *arguments: Any, **options: Any) -> None:
        logger.warning("dropped job %s: this version has no job %s", self.id, self.func_name)


class ControlWorker(SimpleWorker):
    """An RQ worker that does not fork, with short timeouts.

    The parts that need a further connection or thread are disabled.
    """

    max_connection_wait_time = 1.0
    log_result_lifespan = False

    def __init__(self, client: redis.Redis, driver: Driver) -> None:
        super().__init__(
            [QUEUE],
            name=f"{QUEUE}-{uuid.uuid4().hex}",
            connection=client,
            job_class=ControlJob,
            serializer=JSONSerializer,
            worker_ttl=_WORKER_TTL,
            maintenance_interval=60,
            log_job_description=False,
        )
        self._driver = driver

    def execute_job(self, job: Job, queue: JobQueue) -> None:
        """Run the job in this process."""
        assert isinstance(job, ControlJob), "the worker's `job_class`"
        job.driver = self._driver
        super().execute_job(job, queue)

    def subscribe(self) -> None:
        """Do nothing: there are no remote commands."""

    def unsubscribe(self) -> None:
        """Do nothing: there are no remote commands."""

    def procline(self, message: str) -> None:
        """Do nothing: the process keeps its title."""

    def _install_signal_handlers(self) -> None:
        """Handle signals as RQ does, unless the process stops already.

        A destructor of redis-py may have swallowed the exception of the first signal, and a second
        one would interrupt `Driver.stop`.
        """
        if not self._driver.stopping.is_set():
            super()._install_signal_handlers()  # type: ignore[no-untyped-call]

    def handle_warm_shutdown_request(self) -> None:
        """Set the stop flag; slices end at their next check."""
        ignore_stop_signals()
        self._driver.stopping.set()

    def set_shutdown_requested_date(self) -> None:
        """Do nothing: RQ writes in the handler of a signal, and Redis may be unavailable."""

    def handle_exception(self, job: Job, *exc_info: Any, **named: Any) -> None:
        """Log an outage of Redis around a job in one line, without RQ's traceback."""
        if isinstance(exc_info[1], redis.RedisError):
            self._driver.outage.failed(exc_info[1])
        else:
            super().handle_exception(job, *exc_info, **named)

    def handle_job_success(self, job: Job, *arguments: Any, **named: Any) -> None:
        """Remove the last heartbeat of a job that Redis lost while it ran: nothing else does."""
        try:
            super().handle_job_success(job, *arguments, **named)
        except (InvalidJobOperation, ValueError, KeyError):  # the last two if a run of it is partly gone
            logger.info("Redis lost job %s while it ran", job.id)
            with self.connection.pipeline() as pipeline:
                self.cleanup_execution(job, pipeline=pipeline)
                pipeline.unlink(job.key)
                pipeline.execute()

    @property
    def should_run_maintenance_tasks(self) -> bool:
        """Return RQ's answer; raise `StopRequested` once the process is to stop.

        RQ asks before it waits for each job. A signal's exception alone is not enough: redis-py's
        destructors swallow it.
        """
        if self._driver.stopping.is_set():
            raise StopRequested
        self._driver.outage.worked()  # RQ has just written its heartbeat
        return bool(super().should_run_maintenance_tasks)

    def get_heartbeat_ttl(self, job: Job) -> int:
        """Return a short lifetime: jobs have no time limit, and the worker's entry must expire
        after a kill.
        """
        return _WORKER_TTL + 60


class _StoppedWhileIdle(JobsError):
    """A signal came while no job ran."""


def _serve(url: str, driver: Driver) -> None:
    """Run RQ's loop once; it ends when Redis is unavailable for longer than a moment."""
    client = connect(url, db=driver.queue.settings.rq_db)
    try:
        check_server(driver.queue.redis)
        ControlWorker(client, driver).work(logging_level="WARNING")
    except (redis.RedisError, QueueUnavailable, ServerError) as error:
        driver.outage.failed(error)
    finally:
        client.close()
    if not driver.stopping.is_set():
        time.sleep(_RETRY_SECONDS)


def _stop(driver: Driver) -> None:
    """Drain finished results, since Redis may not come back."""
    try:
        driver.stop()
    except (redis.RedisError, QueueUnavailable) as error:
        logger.warning("Redis unavailable; finished lines stay in Redis: %s", error)


def _is_news(outage: OutageLog, record: logging.LogRecord) -> bool:
    """Return False for RQ's lines about an outage of Redis, which `outage` logs."""
    said = record.args if isinstance(record.args, tuple) else ()
    errors = [one for one in (*said, (record.exc_info or (None, None))[1]) if isinstance(one, redis.RedisError)]
    for error in errors:
        outage.failed(error)
    return not errors


if __name__ == "__main__":
    main()
