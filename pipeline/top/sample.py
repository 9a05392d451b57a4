"""One reading of a fleet and of its batches, from which a frame is made."""

import time
from typing import NamedTuple

from jobs.protocol.states import END_STATES
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.reading import QueueReading, read_fleet
from jobs.queue.request_queue import Queue

_ENDED_BATCHES = 50  # more than a window has rows for


class BatchSample(NamedTuple):
    """A batch, and how many seconds ago it ended, and lines were last appended; None while it has
    not, and where none were.
    """

    id: str
    status: BatchStatus
    ended_ago: float | None
    appended_ago: float | None


class Sample(NamedTuple):
    """What Redis had at one moment."""

    taken: float  # by the monotonic clock of this process
    fleet: QueueReading
    batches: list[BatchSample]  # those at work, then those that ended, the latest first


def take_sample(queue: Queue) -> Sample:
    """Read it. Raise `QueueUnavailable` or a `RedisError` while Redis does not answer."""
    fleet, now = read_fleet(queue), queue.now()
    active, ended = queue.active_batches(), queue.ended_batches(_ENDED_BATCHES)
    statuses = queue.statuses([batch for batch in ended if batch not in active])
    # One that has just ended is still being cleaned
    found = [_sample(batch, one, now, now if one.state in END_STATES else None) for batch, one in active.items()]
    found += [_sample(batch, one, now, ended[batch]) for batch, one in statuses.items()]
    known = [one for one in found if one.status.exists and (one.ended_ago is None) != (one.status.state in END_STATES)]
    return Sample(time.monotonic(), fleet, sorted(known, key=_place))


def _sample(batch: str, status: BatchStatus, now: float, ended: float | None) -> BatchSample:
    ago = (None if moment is None else max(0.0, now - moment) for moment in (ended, status.appended_at or None))
    return BatchSample(batch, status, *ago)


def _place(batch: BatchSample) -> tuple[float, bool, str]:
    """Batches whose lines run come before those that are checked, and the oldest first."""
    return -1 if batch.ended_ago is None else batch.ended_ago, batch.status.state == "validating", batch.id
