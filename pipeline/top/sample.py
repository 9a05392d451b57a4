"""One sample of a fleet and its batches, the data of a frame."""

import time
from typing import NamedTuple

from jobs.protocol.states import END_STATES
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.reading import QueueReading, read_fleet
from jobs.queue.request_queue import Queue

_ENDED_BATCHES = 50  # more than a window has rows for


class BatchSample(NamedTuple):
    """A batch with the seconds since its end and since lines were last appended, or None."""

    id: str
    status: BatchStatus
    ended_ago: float | None
    appended_ago: float | None


class Sample(NamedTuple):
    """The state of the fleet in Redis at one moment."""

    taken: float  # by the monotonic clock of this process
    fleet: QueueReading
    batches: list[BatchSample]  # active ones, then ended ones, the latest first


def take_sample(queue: Queue) -> Sample:
    """Take a sample. Raise `QueueUnavailable` or a `RedisError` while Redis does not answer."""
    fleet, now = read_fleet(queue), queue.now()
    active, ended = queue.active_batches(), queue.ended_batches(_ENDED_BATCHES)
    statuses = queue.statuses([batch for batch in ended if batch not in active])
    # A batch that has just ended may still be among the active ones
    found = [_sample(batch, one, now, now if one.state in END_STATES else None) for batch, one in active.items()]
    found += [_sample(batch, one, now, ended[batch]) for batch, one in statuses.items()]
    known = [one for one in found if one.status.exists and (one.ended_ago is None) != (one.status.state in END_STATES)]
    return Sample(time.monotonic(), fleet, sorted(known, key=_place))


def _sample(batch: str, status: BatchStatus, now: float, ended: float | None) -> BatchSample:
    ago = (None if moment is None else max(0.0, now - moment) for moment in (ended, status.appended_at or None))
    return BatchSample(batch, status, *ago)


def _place(batch: BatchSample) -> tuple[float, bool, str]:
    """Return the sort key: running batches before those in validation, the oldest first."""
    return -1 if batch.ended_ago is None else batch.ended_ago, batch.status.state == "validating", batch.id
