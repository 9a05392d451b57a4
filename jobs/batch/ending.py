"""Cancel a running batch, and remove from Redis and disk what an ended one no longer needs."""

import contextlib
import time
from typing import Any

import redis

from jobs.batch.retention import tidy
from jobs.protocol.states import CANCELLABLE, END_STATES
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import wake


def begin_cancel(queue: Queue, batch: str, generation: int) -> bool:
    """Move a batch to `cancelling`; False if it moved on meanwhile.

    The generation rises, so that a job which writes the results of a finished batch just now gives
    way to one of the cancelled one.
    """
    changes = {"timestamps": {"cancelling": time.time()}, "generation": generation + 1}
    if not queue.transition(batch, CANCELLABLE, "cancelling", changes, generation):
        return False
    queue.remove_unfinished(batch)
    wake(queue.redis, batch)
    return True


def clean_up(queue: Queue, batch: str) -> None:
    """Leave nothing of a batch that ended in Redis but its record, for some days; of the folder of
    one that came through the API, little.

    Does nothing while it runs, or is just begun again.
    """
    if queue.batch_fields(batch).state in END_STATES:
        queue.remove_unfinished(batch)  # lines that Redis takes for unfinished
    with queue.redis.pipeline() as pipeline, contextlib.suppress(redis.WatchError):
        pipeline.watch(keys.batch(batch))  # type: ignore[no-untyped-call]
        record: Any = pipeline.hmget(keys.batch(batch), "state", "root", "tenant")
        state, root, tenant = (value.decode() if value is not None else "" for value in record)
        if state not in END_STATES:
            return
        if root:
            tidy(root)
        pipeline.multi()
        pipeline.srem(keys.ACTIVE, batch)
        pipeline.srem(keys.open_batches(tenant), batch)
        pipeline.hset(keys.batch(batch), "result_bytes", 0)  # of results that go with the end
        pipeline.expire(keys.batch(batch), queue.settings.ended_batch_seconds)
        names = (keys.bodies, keys.results, keys.done, keys.parts, keys.batch_models)
        pipeline.unlink(*(name(batch) for name in names))
        pipeline.execute()
