"""Rounds over the active batches, a bounded number at a time.

What happens to a batch asks for its own slice. The rounds find what was lost on the way, and cost
the same each second, however many batches wait.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jobs.queue.batch_fields import BatchStatus
from jobs.queue.request_queue import Queue


class RoundLook(NamedTuple):
    """The batches of one look."""

    records: Mapping[str, BatchStatus]
    gone: set[str]
    """At the end of a round: batches that were known at its begin, and are not active any more."""


class Rounds:
    """The looks of one process, each at about `batches`; a round over more takes several looks."""

    def __init__(self, queue: Queue, batches: int) -> None:
        self._queue = queue
        self._batches = batches
        self._cursor = 0
        self._missing = set[str]()

    def look(self, known: set[str]) -> RoundLook:
        """Read the next batches; `known` are those of the caller. Raise what redis-py raises."""
        if not self._cursor:
            self._missing = known
        self._cursor, records = self._queue.some_active_batches(self._cursor, self._batches)
        self._missing = self._missing - records.keys()
        return RoundLook(records, set() if self._cursor else self._missing)
