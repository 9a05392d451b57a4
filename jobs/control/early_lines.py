"""Early lines: requests of a large input that workers get while the rest of it is validated.

No client sees them, nor what came of them, before the batch is in progress; nothing of them is
drained before. The plan holds them too, and passes over those that Redis has. Of a file that is
refused, and of one that changed, they are removed.
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

_SMALLEST_BYTES = 1024 * 1024  # of an input, which else is validated at once
_FIRST_LINES = 64
_MOST_LINES = WINDOW_LINES // 2 - MAX_ITEMS  # after which one more window is fed
_NO_INPUT = "-"
_LOOK_LINES = 256  # that pass before a full window is looked at again


class EarlyLines:
    """Takes the lines of a source in order, and feeds some of the good ones, by prefix within each
    window.

    They fill half of what a batch may have in Redis, so that the plan is fed as soon as it is made.
    After a bad line, once Redis takes none, and while the tenant has too many tokens in queue, also
    in early lines of other batches, it feeds no more: the validation goes on.
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
        self._passed = 0  # since the full window was looked at
        record = held.record()
        self._tokens = record.early_tokens  # of a killed pass, whose lines may be there
        if record.early not in ("", self._stamp):
            self._tokens = 0
            held.discard_early_lines()

    def add(self, line: InputLine, order: bytes | None, body_bytes: int) -> None:
        """Take the next line, what sorts it by its prefix (None for a bad one), and the bytes of
        the bodies up to here.
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
        # The tenant "" is that of a server without keys, which has no limits
        if spec.tenant and not self._admit(max(tokens, self._tokens)):
            return
        now = time.time()
        rows = [(line.number, request_of(spec, line.number, line.raw or b"", now)) for _, line in sorted(self._lines)]
        self._ends = not queue.ingest_early(batch, rows, self._stamp)
        self._lines, self._bytes, self._size, self._passed = [], 0, MAX_ITEMS, -1

    def _admit(self, tokens: int) -> bool:
        """Note how many tokens the lines up to here have, unless the tenant's open batches would
        have more than they may.
        """
        held, spec = self._held, self._held.manifest.spec
        # Before the others are looked at, so that of two at once one sees the other
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
    """Remove early lines of another source than the validated one, and all where parts show that
    Redis went back. Return whether early lines are left.
    """
    early = held.record().early
    if early not in ("", stamp_in(held.manifest)):
        held.discard_early_lines()
        return False
    return early != ""


def stamp_in(manifest: Manifest) -> str:
    """Return the stamp that early lines must have when the batch becomes in progress. Where there
    are parts, none has it.
    """
    return _NO_INPUT if manifest.parts else manifest.early_stamp


def source_stamp(manifest: Manifest) -> str:
    """Return the stamp of the source as it is known to be."""
    return _as_text(manifest.source_bytes, manifest.source_mtime_ns)


def _as_text(size: int, mtime_ns: int) -> str:
    return f"{size} {mtime_ns}"
