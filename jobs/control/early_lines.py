"""Early lines: requests of a large input that workers get while the rest of it is validated.

Clients see neither them nor their results before the batch is in progress, and nothing is drained
before. The plan has these lines, too, and skips those that Redis has. They are removed if the file
is refused or has changed.
"""

import time

import redis

from jobs.batch.input_files import InputLine
from jobs.batch.manifest import Manifest
from jobs.batch.queued_tokens import others_early_tokens
from jobs.batch.source_check import estimated_tokens
from jobs.control.advance import CHUNK_BYTES, WINDOW_LINES, most_window_bytes, request_of
from jobs.control.slices import Slice
from jobs.queue.scripts import MAX_ITEMS, QueueUnavailable
from jobs.store.storage import stamp_of

_SMALLEST_BYTES = 1024 * 1024  # a smaller input is validated at once
_FIRST_LINES = 64
_MOST_LINES = WINDOW_LINES // 2 - MAX_ITEMS  # then one more window is ingested
_NO_INPUT = "-"
_LOOK_LINES = 256  # lines between two checks of a full window


class EarlyLines:
    """Takes the lines of a source in order, and ingests some of the valid ones.

    Lines are sorted by prefix within each window. They fill half of a batch's share of Redis, so
    that the plan can be ingested as soon as it exists. Ingest ends (and validation continues) after
    a bad line, when Redis accepts no more, and when the tenant has too many queued tokens,
    including early lines of other batches.
    """

    def __init__(self, held: Slice, source: str) -> None:
        stamp = stamp_of(source)
        manifest = held.manifest
        self._held = held
        self._stamp = "" if stamp is None else _as_text(*stamp)
        self._ends = not (stamp and stamp[0] >= _SMALLEST_BYTES) or bool(manifest.parts) or manifest.spec.by_model
        self._lines: list[tuple[bytes, InputLine]] = []
        self._bytes = 0
        self._size = _FIRST_LINES
        self._most_bytes = min(CHUNK_BYTES, most_window_bytes(held.queue) // 2)
        self._passed = 0  # lines since the last check of the full window
        record = held.record()
        self._tokens = record.early_tokens  # from a killed pass, whose lines may be in Redis
        if record.early not in ("", self._stamp):
            self._tokens = 0
            held.discard_early_lines()

    def add(self, line: InputLine, order: bytes | None, body_bytes: int) -> None:
        """Take the next line, its sort key by prefix (None for a bad one), and the bytes of bodies
        so far.
        """
        if self._ends:
            return
        if order is None or line.raw is None:
            self._end()
            return
        if len(self._lines) < self._size and self._bytes < self._most_bytes:
            self._lines.append((order, line))
            self._bytes += len(line.raw)
            return
        if self._passed % _LOOK_LINES == 0:
            self._held.check_current()
            try:
                self._feed_if_room(estimated_tokens(body_bytes))
            except (QueueUnavailable, redis.RedisError):
                self._ends, self._lines = True, []
        self._passed += 1

    def _feed_if_room(self, tokens: int) -> None:
        queue, batch, spec = self._held.queue, self._held.batch, self._held.manifest.spec
        most = spec.queued_tokens
        if most is not None and tokens > most:  # the batch will be refused
            self._end()
            return
        lines, size, active = queue.window(batch)
        if lines >= _MOST_LINES or size >= most_window_bytes(queue, active) // 2:
            return
        # The tenant "" is that of a server without keys, which has no limits.
        if spec.tenant and not self._admit(max(tokens, self._tokens)):
            return
        now = time.time()
        defaults = self._held.manifest.defaults
        if defaults and not self._held.fields.defaults:  # for a repeated validation
            self._held.note({"defaults": defaults})
        rows = [
            (line.number, request_of(spec, line.number, line.raw or b"", now, defaults))
            for _, line in sorted(self._lines)
        ]
        self._ends = not queue.ingest_early(batch, rows, self._stamp)
        self._lines, self._bytes, self._size, self._passed = [], 0, MAX_ITEMS, -1

    def _admit(self, tokens: int) -> bool:
        """Record the tokens of the lines so far; return whether the tenant's batches are within the
        limit.
        """
        held, spec = self._held, self._held.manifest.spec
        # Written before reading the others, so that one of two concurrent batches sees the other.
        held.note({"early_tokens": tokens})
        most = spec.queued_tokens
        if most is not None and tokens + others_early_tokens(held.queue, spec.tenant, held.batch) > most:
            held.note({"early_tokens": self._tokens})
            return False
        self._tokens = tokens
        return True

    def _end(self) -> None:
        self._ends, self._lines = True, []
        self._held.discard_early_lines()


def discard_stale(held: Slice) -> bool:
    """Remove early lines of another source than the validated one.

    Remove all of them if parts show that Redis lost data. Return whether early lines remain.
    """
    early = held.record().early
    if early not in ("", stamp_in(held.manifest)):
        held.discard_early_lines()
        return False
    return early != ""


def stamp_in(manifest: Manifest) -> str:
    """Return the stamp that early lines must have when the batch becomes in progress.

    If there are parts, no stamp matches.
    """
    return _NO_INPUT if manifest.parts else manifest.early_stamp


def source_stamp(manifest: Manifest) -> str:
    """Return the known stamp of the source."""
    return _as_text(manifest.source_bytes, manifest.source_mtime_ns)


def _as_text(size: int, mtime_ns: int) -> str:
    return f"{size} {mtime_ns}"
