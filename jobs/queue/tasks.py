"""The jobs of a batch in RQ: enqueue one, see whether it waits or runs, forget it."""

import contextlib
from typing import NamedTuple

import redis
import rq.executions
from rq import Queue as JobQueue
from rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from jobs.protocol.states import QUEUES, JobName
from jobs.queue import keys

_FAILURE_TTL = 3600


def enqueue(client: redis.Redis, job: JobName, batch: str, generation: int) -> bool:
    """Hands a job to RQ, once: False if this generation's is waiting or running already."""
    queue = JobQueue(QUEUES[job], connection=client, serializer=JSONSerializer)
    name = job_id(job, batch, generation)
    for _ in range(2):
        try:
            queue.enqueue_call(
                function_name(job),
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


def function_name(job: JobName) -> str:
    """Return the name of the job's function in RQ, which every version must keep.

    It is no import path: `rq_worker` looks it up in a table.
    """
    return f"jobs.{job}.run"


def job_id(job: JobName, batch: str, generation: int) -> str:
    """The id that RQ knows the job by."""
    return f"{job}-{batch}-{generation}"


def batch_of(name: str) -> str:
    """Return the batch of which `name` is a job."""
    return name.partition("-")[2].rpartition("-")[0]


def is_waiting(client: redis.Redis, job: JobName, batch: str, generation: int) -> bool:
    """Return whether the job is in its queue and will run when a process is free."""
    queue = JobQueue(QUEUES[job], connection=client, serializer=JSONSerializer)
    return queue.get_job_position(job_id(job, batch, generation)) is not None


def others_wait(client: redis.Redis) -> bool:
    """Return whether slices of other batches wait."""
    return JobQueue(QUEUES["advance"], connection=client, serializer=JSONSerializer).count > 0


def waiting_jobs(client: redis.Redis) -> set[str]:
    """Return the ids of all jobs in a queue, which is cheaper than many calls of `is_waiting`."""
    queues = (JobQueue(name, connection=client, serializer=JSONSerializer) for name in set(QUEUES.values()))
    return {job for queue in queues for job in queue.get_job_ids()}


class Execution(NamedTuple):
    """A job that RQ takes for running, and which of its runs that is."""

    queue: str
    job: str
    run: str


def executions(client: redis.Redis) -> set[Execution]:
    """What RQ takes for running: also what ran in processes that were killed, which it would keep
    for over an hour.
    """
    queues = set(QUEUES.values())
    return {
        Execution(queue, *ids)
        for queue in queues
        for ids in _started(client, queue).get_job_and_execution_ids(cleanup=False)
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


def _delete(job: Job) -> None:
    """RQ reads all runs of a job first, and fails at one that is named still and gone already: so
    what names them goes before.
    """
    job.connection.unlink(job.execution_registry.key)
    job.delete()


def _started(client: redis.Redis, queue: str) -> StartedJobRegistry:
    return StartedJobRegistry(queue, connection=client, serializer=JSONSerializer)


def wake(client: redis.Redis, batch: str) -> None:
    """Ask the ticker for another slice of the batch, as a claim does at low water."""
    client.xadd(keys.control(keys.JOBS_CONTROL), {"k": "batch", "v": batch, "s": 0}, maxlen=1000, approximate=True)
