"""Cancel a running batch, and clean up an ended one in Redis and on disk."""

import time

from jobs.batch.retention import tidy
from jobs.protocol.states import CANCELLABLE, END_STATES
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import wake

_TIDY_SECONDS = 600.0


def begin_cancel(queue: Queue, batch: str, generation: int) -> bool:
    """Move a batch to `cancelling`; return False if its state has changed meanwhile.

    The generation rises, so that a job that is writing the results of a finished batch is
    superseded by the job of the cancelled one.
    """
    changes = {"timestamps": {"cancelling": time.time()}, "generation": generation + 1}
    if not queue.transition(batch, CANCELLABLE, "cancelling", changes, generation):
        return False
    queue.remove_unfinished(batch)
    wake(queue.redis, batch)
    return True


def clean_up(queue: Queue, batch: str) -> None:
    """Remove all of an ended batch from Redis except its record, which expires after some days.

    Also remove most of its folder, if it came through the API. Does nothing while the batch runs or
    was just restarted. While its bucket is unavailable, the ticker retries for ten minutes.
    """
    fields = queue.batch_fields(batch)
    if fields.state not in END_STATES:
        return
    queue.remove_unfinished(batch)  # lines that are unfinished in Redis
    is_tidy = not fields.root or tidy(fields.root)
    # A bucket may refuse forever, and Redis has no room for all ended batches.
    if is_tidy or queue.now() > fields.timestamps.get(fields.state, 0.0) + _TIDY_SECONDS:
        queue.clean(batch, fields)
