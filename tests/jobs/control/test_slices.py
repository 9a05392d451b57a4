"""What RQ keeps of jobs is forgotten whatever is left of it."""

import pytest
import redis
from rq import Queue as JobQueue
from rq import SimpleWorker
from rq.executions import prepare_execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs.queue.tasks import enqueue, executions, forget_execution, job_id


def begun(client: redis.Redis) -> Job:
    """A job that RQ takes for running."""
    assert enqueue(client, "advance", "batch_x", 1)
    queue = JobQueue("advance", connection=client, serializer=JSONSerializer)
    job = queue.fetch_job(job_id("advance", "batch_x", 1))
    assert job is not None
    queue.remove(job)
    prepare_execution(SimpleWorker([queue], connection=client, serializer=JSONSerializer), job)
    job.set_status(JobStatus.STARTED)
    return job


@pytest.mark.parametrize("gone", ["", "rq:execution:*", "rq:executions:*", "rq:job:*"])
def test_nothing_is_left_of_a_job_that_is_forgotten(redis_client: redis.Redis, gone: str) -> None:
    """What RQ notes of it goes away at different times, or is lost in part with Redis' last
    second.
    """
    begun(redis_client)
    (execution,) = executions(redis_client)
    for key in redis_client.scan_iter(gone) if gone else ():
        redis_client.delete(key)
    forget_execution(redis_client, execution)
    assert executions(redis_client) == set()
    left = {key.decode() for key in redis_client.scan_iter(f"*{execution.job}*") if redis_client.ttl(key) < 0}
    assert left == set()


@pytest.mark.parametrize("gone", ["", "rq:execution:*"])
def test_a_failed_job_does_not_bar_the_next_of_its_name(redis_client: redis.Redis, gone: str) -> None:
    begun(redis_client).set_status(JobStatus.FAILED)
    for key in redis_client.scan_iter(gone) if gone else ():
        redis_client.delete(key)
    assert enqueue(redis_client, "advance", "batch_x", 1)
