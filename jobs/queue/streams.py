"""Reading the streams that workers write: tokens, those of API processes, and control streams."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jobs.protocol.requests import BatchEntry, RequestKey, StreamEntry, TokenChunk, unpack_chunks, unpack_result
from jobs.protocol.results import Result
from jobs.queue import keys
from jobs.queue.base import QueueBase, text
from jobs.queue.connection import MAX_BLOCK_SECONDS
from jobs.queue.scripts import persistently

FIRST_ID = "0-0"
"""The position before every entry of a stream."""

API_ALIVE_SECONDS = 60
"""How long live calls outlive their API process, unless a client reads their streams."""


class ApiItem(msgspec.Struct, array_like=True, gc=False):
    """A worker's message about one request in the stream of an API process.

    `entry_id` is that of the same entry in the request's token stream. Without `chunks` the entry
    is only there, since it is too large to repeat.
    """

    name: str
    entry_id: str
    accepted: str  # "0", "1", or instead of "1" the worker's fingerprint
    chunks: list[TokenChunk] | None
    result: Result | None = None

    def entry(self, key: RequestKey) -> StreamEntry | None:
        """Return the request's last stream entry, or None if it is not here."""
        if self.chunks is None:
            return None
        return _entry(key, self.entry_id, self.chunks, self.accepted, self.result)


_MOST_LARGE = 16  # large entries read from the requests' own streams at once
_DISCARDED = b"discarded"  # as in `discard.lua`
_group_decoder = msgspec.msgpack.Decoder(list[ApiItem])


class ControlMessage(msgspec.Struct, frozen=True):
    """An order to a worker, or a notification of the control plane (`kind` "batch").

    "isolate" orders a worker to requeue all it holds and to claim: quarantined requests wait for a
    worker that runs nothing else.
    """

    id: str  # of the stream entry; the next read starts after it
    kind: Literal["bell", "cancel", "watch", "isolate", "batch"]
    keys: list[RequestKey] = []
    # Cancel, watch: every request of this batch. Batch: its ready list is low, or its last line was
    # committed.
    batch: str = ""
    seconds: int = 0  # watch: for how long


class Streams(QueueBase):
    """Methods that read streams.

    Blocking reads use a client of their own and wait at most `MAX_BLOCK_SECONDS`.
    """

    def read_tokens(self, positions: Mapping[RequestKey, str], timeout: float = 0.0) -> list[StreamEntry]:
        """Return entries of the requests' token streams after the given ids (`FIRST_ID` for all).

        Entries are in each stream's order. Waits up to `timeout` seconds for the first one. A
        stream is removed some time after its request ended; at once for a batch request that no
        client watched (its result is then in `results` or a part).
        """
        names = {keys.tokens(str(key)): key for key in positions}
        found = self._read_streams({name: positions[key] for name, key in names.items()}, timeout)
        return [parse_entry(names[name], entry_id, fields) for name, entry_id, fields in found]

    def control_messages(self, worker: str, last_id: str, timeout: float) -> list[ControlMessage]:
        """Return orders to a worker after `last_id` (`FIRST_ID` at first).

        Waits up to `timeout` seconds for one. The control plane reads its own under the name
        `keys.JOBS_CONTROL`.
        """
        found = self._read_streams({keys.control(worker): last_id}, timeout)
        return [_parse_control(entry_id, fields) for _, entry_id, fields in found]

    def watch(self, target: RequestKey | str, seconds: int) -> str:
        """Record that a client reads the token stream of a request, or of every request of a batch.

        Workers then publish at once. A batch gets a stream of its own for that time; return the id
        of its last entry ("" for a request).
        """
        return text(self._scripts.call("watch", [str(target), seconds]))

    def running(self, batch: str, limit: int | None = None) -> list[RequestKey]:
        """Return the first `limit` requests of a batch that workers have begun."""
        begun = (
            RequestKey.parse(name)
            for name in {*self._command("HKEYS", keys.LEASE), *self._command("HKEYS", keys.TRIES)}
        )
        return sorted(key for key in begun if key.batch == batch)[:limit]

    def read_ranges(self, ranges: Sequence[tuple[RequestKey, str, str]]) -> list[list[StreamEntry]]:
        """Return entries of requests' token streams in ranges of ids, in the form of XRANGE.

        A stream that is gone has none.
        """
        answers = self.commands(("XRANGE", keys.tokens(str(key)), first, last) for key, first, last in ranges)
        return [
            [parse_entry(key, text(entry_id), fields) for entry_id, fields in found]
            for (key, _, _), found in zip(ranges, answers, strict=True)
        ]

    def read_batch(self, batch: str, last_id: str, limit: int = 200) -> list[BatchEntry] | None:
        """Return entries of a watched batch's stream after `last_id`; at most 16 large ones.

        Return None if that entry is not there, so that later ones may be missing: it was trimmed or
        lost, or the stream is another one.
        """
        found = self._command("XRANGE", keys.batch_tokens(batch), last_id, "+", "COUNT", limit + 1)
        if not found or text(found[0][0]) != last_id:
            return None
        entries: list[BatchEntry] = []
        large: list[tuple[BatchEntry, tuple[RequestKey, str, str]]] = []
        for entry_id, fields in found[1:]:
            entry = _parse_batch_entry(text(entry_id), fields)
            entries.append(entry)
            if entry.key is not None and not fields[b"p"]:
                large.append((entry, (entry.key, entry.entry_id, entry.entry_id)))
                if len(large) == _MOST_LARGE:
                    break
        own = self.read_ranges([place for _, place in large])
        for (entry, _), same in zip(large, own, strict=True):
            entry.chunks.extend(chunk for one in same for chunk in one.chunks)
        return entries

    def last_of_batch(self, batch: str) -> str | None:
        """Return the id of the last entry of a batch's stream; None if there is no stream."""
        found = self._command("XREVRANGE", keys.batch_tokens(batch), "+", "-", "COUNT", 1)
        return text(found[0][0]) if found else None

    def discarded_at(self, batch: str) -> str:
        """Return the id of the entry that says that early lines were discarded, else `FIRST_ID`.

        No later entry is missing.
        """
        found = self._command("XRANGE", keys.batch_tokens(batch), "-", "+", "COUNT", 1)
        return text(found[0][0]) if found and found[0][1][b"e"] == _DISCARDED else FIRST_ID

    def follow_answers(self, batch: str, seconds: int) -> str:
        """Make commits publish the lines that they answer, for `seconds`.

        Return the position for the first call of `answered`.
        """
        return text(self._scripts.call("follow", [batch, seconds]))

    def answered(self, batch: str, last_id: str, timeout: float) -> tuple[list[int], str]:
        """Return lines of a batch that got their results after `last_id`, and the next position.

        Waits up to `timeout` seconds for one. Some are missing if the stream was trimmed or lost.
        """
        found = self._read_streams({keys.answered(batch): last_id}, timeout)
        lines = [int(line) for _, _, fields in found for line in fields[b"l"].split()]
        return lines, found[-1][1] if found else last_id

    def _read_streams(self, positions: Mapping[str, str], timeout: float) -> list[tuple[str, str, dict[bytes, bytes]]]:
        if not positions:
            return []
        after: dict[Any, Any] = dict(positions)
        wait = {"block": max(1, int(min(timeout, MAX_BLOCK_SECONDS) * 1000))} if timeout > 0 else {}

        def read() -> Any:
            return self._blocking.xread(after, count=1000, **wait)

        answer = persistently(read, self.settings.redis_retry_seconds)
        return [(text(name), text(entry_id), fields) for name, entries in answer for entry_id, fields in entries]


def position(entry_id: str) -> tuple[int, int]:
    """Return an entry's id as a tuple that sorts in the order of its stream."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)


def parse_entry(key: RequestKey, entry_id: str, fields: Mapping[bytes, bytes]) -> StreamEntry:
    """Return an entry of the token stream of `key`."""
    result = unpack_result(fields[b"f"]) if b"f" in fields else None
    return _entry(key, entry_id, unpack_chunks(fields[b"p"]), text(fields.get(b"a", b"0")), result)


def _entry(
    key: RequestKey, entry_id: str, chunks: list[TokenChunk], accepted: str, result: Result | None
) -> StreamEntry:
    fingerprint = None if accepted in ("0", "1") else accepted
    return StreamEntry(key, entry_id, chunks, accepted != "0", result, fingerprint)


def parse_api_entry(fields: Mapping[bytes, bytes]) -> list[ApiItem]:
    """Return the items of an entry of an API process' stream.

    An entry has one request, or all that a worker published together (`publish.lua`).
    """
    group = fields.get(b"g")
    if group is not None:
        return _group_decoder.decode(group)
    chunks = unpack_chunks(fields[b"p"]) if b"p" in fields else None
    result = unpack_result(fields[b"f"]) if b"f" in fields else None
    return [ApiItem(text(fields[b"k"]), text(fields[b"e"]), text(fields.get(b"a", b"0")), chunks, result)]


def _parse_batch_entry(entry_id: str, fields: Mapping[bytes, bytes]) -> BatchEntry:
    name, packed, ended = fields[b"k"], fields[b"p"], fields[b"s"]
    return BatchEntry(
        id=entry_id,
        key=RequestKey.parse(name) if name else None,
        entry_id=text(fields[b"e"]),
        chunks=unpack_chunks(packed) if packed else [],
        succeeded=ended == b"1" if ended else None,
    )


def _parse_control(entry_id: str, fields: Mapping[bytes, bytes]) -> ControlMessage:
    target = text(fields.get(b"v"))
    named = "/" in target
    return ControlMessage(
        id=entry_id,
        kind=text(fields[b"k"]),  # type: ignore[arg-type]
        keys=[RequestKey.parse(target)] if named else [],
        batch="" if named else target,
        seconds=int(fields.get(b"s", b"0")),
    )
