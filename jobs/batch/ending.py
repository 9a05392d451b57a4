"""Cancel a running batch, and remove from Redis and disk what an ended one no longer needs."""

import time

from jobs.batch.retention import tidy
from jobs.protocol.states import CANCELLABLE, END_STATES
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
    fields = queue.batch_fields(batch)
    if fields.state not in END_STATES:
        return
    queue.remove_unfinished(batch)  # lines that Redis takes for unfinished
    if fields.root:
        tidy(fields.root)
    queue.clean(batch, fields)
