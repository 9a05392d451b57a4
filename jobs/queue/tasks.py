"""The job by which RQ hands a batch to a process: enqueue it, see whether it waits, forget it."""

import contextlib
from typing import NamedTuple

import redis
import rq.executions
from rq import Queue as JobQueue
from rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from jobs.queue import keys

QUEUE = "batches"
FUNCTION = "jobs.drive.run"
"""The name of the job's function in RQ. It is no import path."""

_OLD_QUEUES = ("advance", "bulk")  # of 0.1.0
_OLD_IDS = ("validate-", "advance-", "finalize-")
_FAILURE_TTL = 3600


def enqueue(client: redis.Redis, batch: str, generation: int) -> bool:
    """Hand a batch to RQ, once: False if this generation's job is waiting or running already."""
    name = job_id(batch, generation)
    for _ in range(2):
        try:
            _queue(client).enqueue_call(
                FUNCTION,
                args=(batch, generation),
                job_id=name,
                timeout=-1,
                result_ttl=0,
                failure_ttl=_FAILURE_TTL,
                unique=True,
            )
            return True
        except DuplicateJobError:
            if not _removed_if_failed(client, name):
                return False
    return False


def _removed_if_failed(client: redis.Redis, name: str) -> bool:
    """RQ keeps a failed job, which would bar the next one of its id; so would what RQ noted of one
    that Redis had forgotten.
    """
    try:
        found = Job.fetch(name, connection=client, serializer=JSONSerializer)
        if found.get_status(refresh=False) not in (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED):
            return False
        _delete(found)
    except (NoSuchJobError, InvalidJobOperation):  # it ended meanwhile, or was forgotten
        client.unlink(Job.key_for(name))
    return True


def job_id(batch: str, generation: int) -> str:
    """The id that RQ knows the job by."""
    return f"drive-{batch}-{generation}"


def waiting_jobs(client: redis.Redis) -> set[str]:
    """Return the ids of the jobs that no process has taken yet."""
    return set(_queue(client).get_job_ids())


def drop_old_jobs(client: redis.Redis) -> None:
    """Remove the jobs that 0.1.0 enqueued: their batches are handed out anew."""
    for name in _OLD_QUEUES:
        for job in _queue(client, name).get_job_ids():
            if job.startswith(_OLD_IDS):
                _queue(client, name).remove(job)
                with contextlib.suppress(NoSuchJobError):
                    _delete(Job.fetch(job, connection=client, serializer=JSONSerializer))


class Execution(NamedTuple):
    """A job that RQ takes for running, and which of its runs that is."""

    queue: str
    job: str
    run: str


def executions(client: redis.Redis) -> set[Execution]:
    """What RQ takes for running: also what ran in processes that were killed, which it would keep
    for over an hour.
    """
    return {
        Execution(name, *ids)
        for name in (QUEUE, *_OLD_QUEUES)
        for ids in _started(client, name).get_job_and_execution_ids(cleanup=False)
    }


def forget_execution(client: redis.Redis, execution: Execution) -> None:
    """Remove all of a job that its batch went on without from RQ; a process that still runs it
    handles that (`rq_worker`).
    """
    with contextlib.suppress(NoSuchJobError):
        _delete(Job.fetch(execution.job, connection=client, serializer=JSONSerializer))
    # Also where RQ's job is gone already
    run = rq.executions.Execution(execution.run, execution.job, connection=client)
    _started(client, execution.queue).remove_execution(run)
    client.unlink(run.key)


def wake(client: redis.Redis, batch: str) -> None:
    """Ask the batch's driver for a slice, as a claim does at low water."""
    client.xadd(keys.control(keys.JOBS_CONTROL), {"k": "batch", "v": batch, "s": 0}, maxlen=1000, approximate=True)


def _queue(client: redis.Redis, name: str = QUEUE) -> JobQueue:
    return JobQueue(name, connection=client, serializer=JSONSerializer)


def _started(client: redis.Redis, queue: str) -> StartedJobRegistry:
    return StartedJobRegistry(queue, connection=client, serializer=JSONSerializer)


def _delete(job: Job) -> None:
    """RQ reads all runs of a job first, and fails at one that is named still and gone already: so
    what names them goes before.
    """
    job.connection.unlink(job.execution_registry.key)
    job.delete()
