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
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from jobs.queue import keys
from jobs.queue.request_queue import Queue

QUEUE = "batches"
FUNCTION = "jobs.drive.run"
"""The name of the job's function in RQ. It is not an import path."""

WAITING = ("ZRANGE", keys.WAITING_BATCHES, 0, -1)
"""The command that returns the batches that no process has claimed yet."""

_OLD_QUEUES = ("advance", "bulk")  # of 0.1.0
_QUEUES = (QUEUE, *_OLD_QUEUES)
_OLD_IDS = ("validate-", "advance-", "finalize-")
_FAILURE_TTL = 3600
_CONTROL_SECONDS = 600


def hand_out(queue: Queue, batch: str) -> None:
    """Dispatch the batch to a process. May be repeated."""
    queue.redis.zadd(keys.WAITING_BATCHES, {batch: time.time()}, nx=True)
    ask_for_process(queue)


def ask_for_process(queue: Queue) -> None:
    """Enqueue the RQ job while a batch waits, unless one is enqueued."""
    jobs = _jobs(queue.rq)
    if queue.redis.exists(keys.WAITING_BATCHES) and not jobs.count:
        jobs.enqueue_call(FUNCTION, timeout=-1, result_ttl=0, failure_ttl=_FAILURE_TTL)


def take_batches(queue: Queue, count: int) -> list[str]:
    """Remove and return the `count` batches that waited longest, for this process."""
    found: Any = queue.redis.zpopmin(keys.WAITING_BATCHES, count)
    ask_for_process(queue)
    return [batch.decode() for batch, _ in found]


def waiting_batches(queue: Queue) -> set[str]:
    """Return the batches that no process has claimed yet."""
    [found] = queue.commands([WAITING])
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

    queue: str
    job: str
    run: str


def has_old_processes(client: redis.Redis) -> bool:
    """Return whether a process of 0.1.0 is registered.

    Such a process cannot end a batch that has early lines, and ends an open one with the requests
    that it has by then.
    """
    with client.pipeline(transaction=False) as pipeline:
        for name in _OLD_QUEUES:
            pipeline.smembers(WORKERS_BY_QUEUE_KEY % name)
        found: set[bytes] = set().union(*pipeline.execute())
    # A killed process stays registered; its key expires.
    return any(client.exists(worker) for worker in found)


class Leftovers(NamedTuple):
    """RQ's records that may be obsolete."""

    old_jobs: list[tuple[str, str]]
    """Queue and id of the jobs that 0.1.0 enqueued."""
    executions: set[Execution]
    """Jobs that RQ lists as running, with those of killed processes, which it keeps for over an
    hour.
    """


def leftovers(client: redis.Redis) -> Leftovers:
    """Find all of them in one round trip."""
    with client.pipeline(transaction=False) as pipeline:
        for name in _OLD_QUEUES:
            pipeline.lrange(_jobs(client, name).key, 0, -1)
        for name in _QUEUES:
            pipeline.zrange(_started(client, name).key, 0, -1)
        found = [list(map(bytes.decode, ids)) for ids in pipeline.execute()]
    queued, started = zip(_OLD_QUEUES, found, strict=False), zip(_QUEUES, found[len(_OLD_QUEUES) :], strict=True)
    return Leftovers(
        [(name, job) for name, ids in queued for job in ids if job.startswith(_OLD_IDS)],
        {Execution(name, *parse_composite_key(entry)) for name, ids in started for entry in ids},
    )


def drop_old_jobs(client: redis.Redis, old_jobs: list[tuple[str, str]]) -> None:
    """Remove the jobs that 0.1.0 enqueued; their batches are dispatched again.

    A batch that a process of 0.1.0 still works on is protected by the lock of its folder.
    """
    for name, job in old_jobs:
        _jobs(client, name).remove(job)
        with contextlib.suppress(NoSuchJobError):
            _delete(Job.fetch(job, connection=client, serializer=JSONSerializer))


def forget_execution(client: redis.Redis, execution: Execution) -> None:
    """Remove a job whose process was killed from RQ.

    A process that still runs it handles the removal (`rq_worker`).
    """
    with contextlib.suppress(NoSuchJobError):
        _delete(Job.fetch(execution.job, connection=client, serializer=JSONSerializer))
    # Also if RQ's job is gone already.
    run = rq.executions.Execution(execution.run, execution.job, connection=client)
    _started(client, execution.queue).remove_execution(run)
    client.unlink(run.key)


def _jobs(client: redis.Redis, name: str = QUEUE) -> JobQueue:
    return JobQueue(name, connection=client, serializer=JSONSerializer)


def _started(client: redis.Redis, queue: str) -> StartedJobRegistry:
    return StartedJobRegistry(queue, connection=client, serializer=JSONSerializer)


def _delete(job: Job) -> None:
    """Delete a job, after its runs' names.

    RQ reads all runs of a job first, and fails at a run that is listed but gone.
    """
    job.connection.unlink(job.execution_registry.key)
    job.delete()
