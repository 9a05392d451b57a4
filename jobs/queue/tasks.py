"""Dispatching batches to the processes that drive them, through an RQ job.

A batch waits in a set, and one RQ job makes a process take several of them: RQ's own work for a job
costs more than the rest of a small batch.
"""

import contextlib
import time
from typing import Any, NamedTuple

import redis
import rq.executions
from rq import Queue as JobQueue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import parse_composite_key

from jobs.queue import keys
from jobs.queue.request_queue import Queue

QUEUE = "batches"
FUNCTION = "jobs.drive.run"
"""The name of the job's function in RQ. It is not an import path."""

_FAILURE_TTL = 3600
_CONTROL_SECONDS = 600


def hand_out(queue: Queue, batch: str) -> None:
    """Dispatch the batch to a process. May be repeated."""
    queue.redis.zadd(keys.WAITING_BATCHES, {batch: time.time()}, nx=True)
    _enqueue(queue)


def ask_for_process(queue: Queue) -> None:
    """Enqueue the RQ job while a batch waits, unless one is enqueued."""
    if queue.redis.exists(keys.WAITING_BATCHES):
        _enqueue(queue)


def take_batches(queue: Queue, count: int) -> list[str]:
    """Remove and return the `count` batches that waited longest, for this process."""
    found: Any = queue.redis.zpopmin(keys.WAITING_BATCHES, count)
    ask_for_process(queue)
    return [batch.decode() for batch, _ in found]


def waiting_batches(queue: Queue) -> set[str]:
    """Return the batches that no process has claimed yet."""
    [found] = queue.commands([("ZRANGE", keys.WAITING_BATCHES, 0, -1)])
    return set(map(bytes.decode, found))


def wake(client: redis.Redis, batch: str) -> None:
    """Ask the batch's driver for a slice, like a claim at low water.

    If Redis refuses, the driver finds by itself that the batch is due.
    """
    name = keys.control(keys.JOBS_CONTROL)
    with contextlib.suppress(redis.RedisError), client.pipeline(transaction=False) as pipeline:
        pipeline.xadd(name, {"k": "batch", "v": batch, "s": 0}, maxlen=1000, approximate=True)
        pipeline.expire(name, _CONTROL_SECONDS)
        pipeline.execute()


class Execution(NamedTuple):
    """A job that RQ lists as running, and the id of the run."""

    job: str
    run: str


def executions(client: redis.Redis) -> set[Execution]:
    """Return the jobs that RQ lists as running.

    RQ lists jobs of killed processes for over an hour.
    """
    started: Any = client.zrange(_started(client).key, 0, -1)
    return {Execution(*parse_composite_key(entry.decode())) for entry in started}


def forget_execution(client: redis.Redis, execution: Execution) -> None:
    """Remove a job whose process was killed from RQ.

    A process that still runs it handles the removal (`rq_worker`).
    """
    with contextlib.suppress(NoSuchJobError):
        job = Job.fetch(execution.job, connection=client, serializer=JSONSerializer)
        # RQ reads all runs of a job first, and fails at a run that is listed but gone.
        client.unlink(job.execution_registry.key)
        job.delete()
    # Also if RQ's job is gone already.
    run = rq.executions.Execution(execution.run, execution.job, connection=client)
    _started(client).remove_execution(run)
    client.unlink(run.key)


def _enqueue(queue: Queue) -> None:
    jobs = _jobs(queue.rq)
    if not jobs.count:
        jobs.enqueue_call(FUNCTION, timeout=-1, result_ttl=0, failure_ttl=_FAILURE_TTL)


def _jobs(client: redis.Redis) -> JobQueue:
    return JobQueue(QUEUE, connection=client, serializer=JSONSerializer)


def _started(client: redis.Redis) -> StartedJobRegistry:
    return StartedJobRegistry(QUEUE, connection=client, serializer=JSONSerializer)
