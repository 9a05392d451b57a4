"""What RQ keeps of jobs is forgotten whatever is left of it."""

import pytest
import redis
from rq import Queue as JobQueue
from rq import SimpleWorker
from rq.executions import prepare_execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs.queue.tasks import FUNCTION, executions, forget_execution


def begun(client: redis.Redis) -> Job:
    """A job that RQ takes for running."""
    queue = JobQueue("batches", connection=client, serializer=JSONSerializer)
    job = queue.enqueue_call(FUNCTION)
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
