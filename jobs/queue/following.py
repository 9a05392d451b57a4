"""Following a request or a batch: the watch record, and the snapshot a batch's client starts from.

The snapshot has the tokens of the batch's running requests so far.
"""

import time
from collections.abc import Iterator, Sequence

from jobs.protocol.requests import BatchEntry, RequestKey, StreamEntry, TokenChunk
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.streams import position

_AT_ONCE = 16
"""Requests whose text is in memory at once."""


def traces(key: RequestKey) -> tuple[tuple[str, ...], ...]:
    """Return commands whose replies are all 0 for a request that does not wait or run and has no
    stream.
    """
    return ("EXISTS", keys.tokens(str(key))), ("HEXISTS", keys.bodies(key.batch), str(key.line))


class Watch:
    """The record that a client reads a request or a batch; renew it with `begin` when it is due."""

    def __init__(self, queue: Queue, target: RequestKey | str, seconds: int) -> None:
        self._queue = queue
        self._target = target
        self._seconds = seconds
        self._until = 0.0

    @property
    def due(self) -> bool:
        """Return whether half of the recorded time has passed."""
        return time.monotonic() > self._until

    def begin(self) -> str:
        """Record the watch now. Return the result of `Queue.watch`."""
        last_id = self._queue.watch(self._target, self._seconds)
        self._until = time.monotonic() + self._seconds / 2
        return last_id


class StreamSnapshot:
    """The entries of a batch's running requests so far; iterate over it once.

    Reading the stream after `last_id` then misses nothing and repeats nothing. `first_id` is the
    batch's last entry when the watch began. `last_id` is None if the stream was trimmed during the
    iteration.
    """

    def __init__(self, queue: Queue, batch: str, first_id: str) -> None:
        self._queue = queue
        self._batch = batch
        self._first_id = first_id
        self._seen: dict[RequestKey, tuple[int, int]] = {}
        self.last_id: str | None = None

    def __iter__(self) -> Iterator[list[BatchEntry]]:
        """Yield small groups of entries."""
        running = self._queue.running(self._batch)
        for start in range(0, len(running), _AT_ONCE):
            yield self._so_far(running[start : start + _AT_ONCE])
        yield from self._meanwhile()

    def _so_far(self, requests: Sequence[RequestKey], end: str = "+") -> list[BatchEntry]:
        """Return one entry per request with all that its own stream holds."""
        own = self._queue.read_ranges([(key, "-", end) for key in requests])
        sums = [_summed_up(entries) for entries in own if entries]
        self._seen |= {entry.key: position(entry.entry_id) for entry in sums if entry.key is not None}
        return sums

    def _meanwhile(self) -> Iterator[list[BatchEntry]]:
        """Yield entries that came since the watch began, without those already yielded."""
        last_id = self._queue.last_of_batch(self._batch)
        reached = max(self._first_id, self._queue.discarded_at(self._batch), key=position)
        while last_id is not None and reached != last_id:
            entries = self._queue.read_batch(self._batch, reached)
            if not entries:
                return
            entries = [entry for entry in entries if position(entry.id) <= position(last_id)]
            if not entries:  # the remaining entries were discarded
                break
            reached = entries[-1].id
            for start in range(0, len(entries), _AT_ONCE):
                yield [one for entry in entries[start : start + _AT_ONCE] for one in self._unseen(entry)]
        self.last_id = last_id

    def _unseen(self, entry: BatchEntry) -> list[BatchEntry]:
        if entry.key is None:
            return []
        known = self._seen.get(entry.key)
        # The request was not running at the start: it began since then, or ended just before.
        if known is None:
            before = self._so_far([entry.key], f"({entry.entry_id}")
            self._seen.setdefault(entry.key, (0, 0))
            return [*before, entry]
        return [entry] if position(entry.entry_id) > known else []


def _summed_up(entries: Sequence[StreamEntry]) -> BatchEntry:
    choices: dict[int, list[TokenChunk]] = {}
    for chunk in (chunk for entry in entries for chunk in entry.chunks):
        choices.setdefault(chunk.choice, []).append(chunk)
    last = entries[-1]
    return BatchEntry(
        id="",
        key=last.key,
        entry_id=last.entry_id,
        chunks=[_joined(chunks) for _, chunks in sorted(choices.items())],
        succeeded=None if last.result is None else last.result.succeeded,
    )


def _joined(chunks: Sequence[TokenChunk]) -> TokenChunk:
    first = chunks[0]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return TokenChunk(first.choice, first.index, token_ids, "".join(chunk.text for chunk in chunks), first.text_offset)
