"""Cancel a running batch, and remove from Redis and disk what an ended one no longer needs."""

import time

from jobs.batch.retention import tidy
from jobs.protocol.states import CANCELLABLE, END_STATES
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import wake

_TIDY_SECONDS = 600.0


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

    Does nothing while it runs, or is just begun again. Where its bucket does not answer, the ticker
    tries again for ten minutes.
    """
    fields = queue.batch_fields(batch)
    if fields.state not in END_STATES:
        return
    queue.remove_unfinished(batch)  # lines that Redis takes for unfinished
    is_tidy = not fields.root or tidy(fields.root)
    # A bucket may refuse for good, and Redis has no room for all that ended
    if is_tidy or queue.now() > fields.timestamps.get(fields.state, 0.0) + _TIDY_SECONDS:
        queue.clean(batch, fields)
