"""The control plane's part of the queue: batch records, their lines and results."""

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.protocol.ids import BATCH, TIME_DIGITS
from jobs.protocol.period import ALWAYS, Period
from jobs.protocol.requests import Request, pack, unpack_result
from jobs.protocol.results import Result
from jobs.queue import keys
from jobs.queue.base import QueueBase, chunks, flat, text
from jobs.queue.batch_fields import FORGOTTEN, BatchFields, BatchStatus, written
from jobs.queue.scripts import MAX_ITEMS, Scripts

MAX_PART_LINES = 4000
"""Most lines of one part. One script registers a part and removes its results, and it should block
the server for at most about 3 ms.
"""


class BatchQueue(QueueBase):
    """Batches in Redis.

    Only `transition` changes a record's `state`, and only commits change its counts.
    """

    def create_batch(
        self,
        batch: str,
        total: int,
        *,
        tenant: str = "",
        state: str = "validating",
        fields: Mapping[str, Any] | None = None,
    ) -> bool:
        """Create the record of a batch; return False if it has one.

        `fields` may hold counts and cursor of a rebuilt batch.
        """
        start = {"tenant": tenant, "total": total, "generation": 0, "completed": 0, "failed": 0, "cursor": 0}
        return self.transition(batch, [""], state, {**start, **(fields or {})})

    def transition(
        self,
        batch: str,
        from_states: Sequence[str],
        to_state: str,
        fields: Mapping[str, Any] | None = None,
        generation: int | None = None,
        stamp: str = "",
        done: bytes | None = None,
    ) -> bool:
        """Move the state to `to_state` and set `fields`; return False, changing nothing, on a
        mismatch.

        The state must be one of `from_states` ("" for no record), and the generation must be
        `generation` if that is given. With a `stamp`, early lines must be of that input. A `done`
        bitmap is stored with the fields. A state may move to itself.
        """
        expected = "" if generation is None else str(generation)
        values = flat(written(fields or {}).items())
        bitmap = b"" if done is None else done or b"\0"
        states = [to_state, len(from_states), *from_states]
        return bool(
            self._scripts.call("transition", [batch, uuid.uuid4().hex, expected, stamp, bitmap, *states, *values])
        )

    def batch_fields(self, batch: str) -> BatchFields:
        """Return the record; its state is "" if there is none."""
        return BatchFields.read_hash(self._command("HGETALL", keys.batch(batch)))

    def active_batches(self) -> dict[str, BatchStatus]:
        """Return the status of each batch that the control plane has work on, by id.

        Not retried while Redis is unavailable, unlike the other methods.
        """
        members: Any = self.redis.smembers(keys.ACTIVE)
        return self._read_statuses(members)

    def some_active_batches(self, cursor: int, count: int) -> tuple[int, dict[str, BatchStatus]]:
        """Return the next cursor, and the status of about `count` of these batches, or of the rest.

        The first cursor is 0; 0 comes back with the last ones. Not retried either.
        """
        found = set[bytes]()
        while True:
            answer: Any = self.redis.sscan(keys.ACTIVE, cursor, count=count)
            cursor = int(answer[0])
            found |= set(answer[1])
            if not cursor or len(found) >= count:
                return cursor, self._read_statuses(found)

    def _read_statuses(self, members: Iterable[bytes]) -> dict[str, BatchStatus]:
        batches, names = sorted(map(text, members)), BatchStatus.__struct_fields__
        with self.redis.pipeline(transaction=False) as pipeline:
            for batch in batches:
                pipeline.hmget(keys.batch(batch), *names)
            rows = pipeline.execute()
        return {batch: BatchStatus.read(names, row) for batch, row in zip(batches, rows, strict=True)}

    def note_risks(self, risks: Mapping[str, str]) -> None:
        """Set the `risk` of batches in progress, which affects their order in the queue."""
        for group in chunks([batch, risk] for batch, risk in risks.items()):
            self._scripts.call("risk", flat(group))

    def note_appended(self, batch: str, tokens: int) -> None:
        """Record an estimate of the tokens of an open batch's requests; the highest one is kept."""
        self._scripts.call("appended", [batch, tokens])

    def batches(self) -> list[str]:
        """Return the ids of all batches that have a record."""
        return list(self.states())

    def states(self) -> dict[str, str]:
        """Return the state of each batch that has a record, by id; remove ids whose record has
        expired.
        """
        states = self.states_of(sorted(text(batch) for batch in self._command("SMEMBERS", keys.BATCHES)))
        if gone := [batch for batch, state in states.items() if not state]:
            self._command("SREM", keys.BATCHES, *gone)
        return {batch: state for batch, state in states.items() if state not in ("", FORGOTTEN)}

    def states_of(self, batches: Sequence[str]) -> dict[str, str]:
        """Return the state of each of these batches, by id; "" for a batch without a record."""
        replies = self.commands(("HGET", keys.batch(batch), "state") for batch in batches)
        return dict(zip(batches, map(text, replies), strict=True))

    def statuses(self, batches: Sequence[str]) -> dict[str, BatchStatus]:
        """Return the status of each of these batches, by id, in one round trip."""
        names = BatchStatus.__struct_fields__
        rows = self.commands(("HMGET", keys.batch(batch), *names) for batch in batches)
        return {batch: BatchStatus.read(names, row) for batch, row in zip(batches, rows, strict=True)}

    def ended_batches(self, count: int) -> dict[str, float]:
        """Return when each of the last `count` ended batches was cleaned (unix seconds), by id,
        latest first.

        At most 100 are stored.
        """
        rows = self._command("ZREVRANGE", keys.ENDED, 0, count - 1, "WITHSCORES")
        return {text(batch): float(score) / 1000 for batch, score in zip(rows[::2], rows[1::2], strict=True)}

    def ingest(self, batch: str, requests: Sequence[tuple[int, Request]], start: int, cursor: int) -> bool:
        """Add at most 500 lines to the ready list and move the batch's cursor from `start` to
        `cursor`.

        Return True if the cursor is now at `cursor`, by this call or an earlier one; False if it is
        elsewhere or the batch is not in progress. Lines that are done or already queued are
        skipped.
        """
        if len(requests) > MAX_ITEMS:
            raise ValueError(f"{len(requests)} lines in one call, at most {MAX_ITEMS}")
        rows = ((line, request.model, pack(request)) for line, request in requests)
        return bool(self._scripts.call("ingest", [batch, start, cursor, "", *flat(rows)]))

    def ingest_early(self, batch: str, requests: Sequence[tuple[int, Request]], stamp: str) -> bool:
        """Add at most 500 lines of a batch in validation, whose input has this stamp.

        Return False if the batch has lines of another stamp, or is no longer in validation. Raise
        `QueueUnavailable` without a retry.
        """
        rows = ((line, request.model, pack(request)) for line, request in requests)
        return bool(Scripts(self.redis, 0.0).call("ingest", [batch, 0, 0, stamp, *flat(rows)]))

    def discard(self, batch: str, state: str, generation: int) -> bool:
        """Remove every early line of a batch, finished or not; resume where a killed call stopped.

        Later commits of these lines change nothing. Return False once the batch is in another state
        or generation; some lines may remain then.
        """
        left = 1
        while left > 0:
            left = int(self._scripts.call("discard", [batch, state, generation, MAX_ITEMS]))
        return left == 0

    def window_bytes(self, batch: str) -> int:
        """Return the bytes of the request bodies in Redis, waiting or running."""
        return int(self._command("HGET", keys.batch(batch), "body_bytes") or 0)

    def window_lines(self, batch: str) -> int:
        """Return the number of lines in Redis, waiting or running."""
        return int(self._command("HLEN", keys.bodies(batch)))

    def window(self, batch: str) -> tuple[int, int, int]:
        """Return `window_lines`, `window_bytes` and the number of active batches, in one round
        trip.
        """
        asked = [("HLEN", keys.bodies(batch)), ("HGET", keys.batch(batch), "body_bytes"), ("SCARD", keys.ACTIVE)]
        lines, size, active = self.commands(asked)
        return int(lines), int(size or 0), int(active)

    def results(self, batch: str, limit: int = MAX_PART_LINES) -> list[tuple[int, Result]]:
        """Return up to `limit` finished lines that are in no part yet, in line order, without
        removing them.
        """
        found: dict[bytes, bytes] = {}
        cursor = None
        while cursor != 0 and len(found) < limit:
            count = min(limit, MAX_ITEMS)
            cursor, group = self._command("HSCAN", keys.results(batch), cursor or 0, "COUNT", count)
            found.update(group)
        lines = sorted((int(line), value) for line, value in found.items())[:limit]
        return [(line, unpack_result(value)) for line, value in lines]

    def results_of(self, batch: str, lines: Sequence[int], most_bytes: int) -> list[Result | None]:
        """Return the results of the first of these lines (at most 500); None for a line without
        one.

        A line has no result here before it is done and after a part holds it. The list ends with
        the line that reaches `most_bytes`.
        """
        found = self._scripts.call("answers", [batch, most_bytes, *lines[:MAX_ITEMS]])
        return [None if value is None else unpack_result(value) for value in found]

    def finished_of(self, batch: str, lines: Sequence[int]) -> list[int]:
        """Return those of these lines that have a result, in Redis or in a part."""
        if not lines:
            return []
        first, last = min(lines) >> 3, max(lines) >> 3
        bits = self._command("GETRANGE", keys.done(batch), first, last).ljust(last - first + 1, b"\0")
        return [line for line in lines if bits[(line >> 3) - first] & 0x80 >> (line & 7)]

    def undrained_lines(self, batch: str) -> int:
        """Return the number of finished lines whose results are in Redis."""
        return int(self._command("HLEN", keys.results(batch)))

    def drained(self, batch: str, part: str, lines: Sequence[int], fields: Mapping[str, Any] | None = None) -> bool:
        """Register a part on disk, remove its lines' results and set `fields`, atomically.

        Return True if the part is registered, by this call or an earlier one. Return False,
        changing nothing, if a line has no result in Redis: another part holds it, and this one must
        not count.
        """
        if len(lines) > MAX_PART_LINES:
            raise ValueError(f"{len(lines)} lines in one part, at most {MAX_PART_LINES}")
        head = [batch, part, self.settings.undrained_bytes, len(lines)]
        return bool(self._scripts.call("drained", [*head, *lines, *flat(written(fields or {}).items())]))

    def restore(self, batch: str, part: str, lines: int, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Mark the lines of a part on disk as done, each with its outcome, then register the part.

        `lines` is the part's number of lines. Restores data that Redis lost; lines already recorded
        as drained do not change.
        """
        left = iter(outcomes)
        name = ""
        while not name:
            group = list(itertools.islice(left, MAX_ITEMS))
            name = part if len(group) < MAX_ITEMS else ""
            good, bad = ([line for line, succeeded in group if succeeded is wanted] for wanted in (True, False))
            head = [batch, name, lines, self.settings.undrained_bytes, len(good)]
            self._scripts.call("restore", [*head, *good, *bad])

    def has_part(self, batch: str, part: str) -> bool:
        """Return whether the part is registered."""
        return bool(self._command("HEXISTS", keys.parts(batch), part))

    def parts(self, batch: str) -> dict[str, int]:
        """Return the registered parts and the number of lines in each."""
        return {text(name): int(count) for name, count in self._command("HGETALL", keys.parts(batch)).items()}

    def set_parts(self, batch: str, generation: int, parts: Mapping[str, int]) -> None:
        """Register these parts, in order, and remove all others.

        Recovery looks only for the last one. Changes nothing in a batch that has ended or has
        another generation.
        """
        self._scripts.call("parts", [batch, generation, *flat(parts.items())])

    def done(self, batch: str) -> bytes:
        """Return the bitmap of lines that have a result: bit 7 of the first byte is line 0, as in
        Redis.
        """
        return bytes(self._command("GET", keys.done(batch)) or b"")

    def open_batch(self, tenant: str, batch: str, most: int | None) -> bool:
        """Count a batch among its tenant's open ones until `clean_up` or `forget`.

        Return False if the tenant already has `most`.
        """
        return bool(self._scripts.call("open_batch", [tenant, batch, "" if most is None else most]))

    def open_batches(self, tenant: str) -> list[str]:
        """Return the tenant's open batches that came through the API.

        A batch may have no record, if the process that created it was killed.
        """
        return sorted(text(batch) for batch in self._command("SMEMBERS", keys.open_batches(tenant)))

    def open_states(self, tenant: str) -> dict[str, str]:
        """Return the state of each of the tenant's open batches; "" if one has no record."""
        return self.states_of(self.open_batches(tenant))

    def dismiss(self, tenant: str, *batches: str) -> None:
        """Remove batches from the tenant's open ones."""
        self._command("SREM", keys.open_batches(tenant), *batches)

    def announce(self, tenant: str, batch: str, *, listed: bool, runs: bool) -> None:
        """Announce a batch before its record is created.

        `listed` adds it to the tenant's listing; `runs` adds it to the active batches and to the
        tenant's open ones.
        """
        commands: list[tuple[Any, ...]] = [("ZADD", keys.batch_index(tenant), 0, batch)] if listed else []
        if runs and listed:
            commands.append(("SADD", keys.open_batches(tenant), batch))
        if runs:
            commands.append(("SADD", keys.ACTIVE, batch))
        self.commands(commands)

    def unlist_batch(self, tenant: str, batch: str) -> None:
        """Remove a batch from the listing."""
        self._command("ZREM", keys.batch_index(tenant), batch)

    def listed_batches(self, tenant: str, after: str | None, count: int, created: Period = ALWAYS) -> list[str]:
        """Return the next `count` ids of the tenant's listing created in that period, newest first.

        They follow `after`, which need not exist.
        """
        first, end = created.names(BATCH, TIME_DIGITS)
        behind = min(filter(None, (after, end)), default=None)
        bounds = ["+" if behind is None else f"({behind}", "-" if first is None else f"[{first}"]
        rows = self._command("ZRANGE", keys.batch_index(tenant), *bounds, "BYLEX", "REV", "LIMIT", 0, count)
        return [text(batch) for batch in rows]

    def remove_unfinished(self, batch: str) -> None:
        """Remove every waiting and running line and notify the workers.

        Change the state first, so that no line is claimed or added meanwhile.
        """
        while int(self._scripts.call("cancel", ["batch", MAX_ITEMS, batch])) > 0:
            pass

    def clean(self, batch: str, fields: BatchFields) -> None:
        """Remove all keys of an ended batch except its record, which expires after some days.

        Changes nothing if the record differs from `fields`.
        """
        self._scripts.call("clean", [batch, fields.token, fields.tenant, self.settings.ended_batch_seconds])

    def forget(self, batch: str) -> None:
        """Remove every key of a batch; resume where a killed call stopped.

        The caller must hold `storage.exclusive`.
        """
        tenant = self.batch_fields(batch).tenant
        while (fields := self.batch_fields(batch)).exists:
            self.transition(batch, [fields.state], FORGOTTEN)
        self.remove_unfinished(batch)
        self.dismiss(tenant, batch)
        lines = (keys.bodies, keys.results, keys.done, keys.answered)
        names = (keys.batch, keys.parts, keys.batch_models, keys.batch_tokens, *lines)
        self._command("UNLINK", *(name(batch) for name in names))
        self._command("ZREM", keys.WATCHED, batch)
        self._command("ZREM", keys.WAITING_BATCHES, batch)
        self._command("ZREM", keys.ENDED, batch)
        self._command("SREM", keys.BATCHES, batch)
        self._command("SREM", keys.ACTIVE, batch)
