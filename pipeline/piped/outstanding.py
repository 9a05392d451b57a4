"""The outstanding lines: read, but without a written answer."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_LINES = 4096
MOST_BYTES = 32 * 1024 * 1024
"""Limit for outstanding lines with their unwritten answers; beyond it no lines are read."""


@dataclass(slots=True)
class _Entry:
    custom_id: str
    size: int
    is_finished: bool = False  # its answer can be read
    answer: bytes | None = None


class Outstanding:
    """A bounded set of outstanding lines. Thread-safe.

    The reader waits in `wait_for_room` until answers are written. Answers are written in the order
    of their arrival; with `ordered`, in the order of their lines.
    """

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}  # by line, in the order of their addition
        self._finished: dict[int, None] = {}  # finished lines with unread answers, in order
        self._answered: list[int] = []  # in the order of their answers' arrival
        self._bytes = self._answer_bytes = 0
        self._is_closed = False

    def wait_for_room(self) -> int:
        """Wait for room; return how many lines may be added, 0 after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._room > 0)
            return 0 if self._is_closed else self._room

    def close(self) -> None:
        """Close the set: `wait_for_room` returns 0 from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def add(self, line: int, custom_id: str, size: int, answer: bytes | None = None) -> None:
        """Add a line, which may have its answer already."""
        with self._changed:
            if line in self._entries:
                return
            self._entries[line] = _Entry(custom_id, size)
            self._bytes += size
            if answer is not None:
                self._answer(line, answer)

    def unanswered(self, lines: Iterable[int] | None = None) -> dict[int, str]:
        """Return the custom_id of each unanswered line of `lines`, by default of all lines."""
        with self._changed:
            found = [(line, self._entries.get(line)) for line in (self._entries if lines is None else lines)]
            return {line: entry.custom_id for line, entry in found if entry is not None and entry.answer is None}

    def finish(self, lines: Iterable[int], is_finished: bool = True) -> None:
        """Record that the answers of lines can be read, or that they cannot."""
        with self._changed:
            for line in lines:
                if (entry := self._entries.get(line)) is not None and entry.answer is None:
                    entry.is_finished = is_finished
                    if is_finished:
                        self._finished[line] = None
                    else:
                        self._finished.pop(line, None)

    def to_read(self, most: int, with_gaps: bool = False) -> dict[int, str]:
        """Return the custom_ids of at most `most` finished lines whose answers are to be read.

        With `ordered`, no line before them lacks its answer, unless `with_gaps`.
        """
        with self._changed:
            lines = self._unread(with_gaps) if self._ordered else self._finished
            return {line: self._entries[line].custom_id for line in itertools.islice(lines, most)}

    def answer(self, line: int, answer: bytes) -> bool:
        """Store the answer of a line, unless it has one; return whether it was stored."""
        with self._changed:
            return self._answer(line, answer)

    def to_write(self, with_gaps: bool = False) -> dict[int, bytes]:
        """Return the answers that may be written now, in order.

        With `ordered`, answers behind an unanswered line are included only if `with_gaps`.
        """
        with self._changed:
            return dict(self._ahead(with_gaps) if self._ordered else self._in_turn())

    def note_written(self, lines: Iterable[int]) -> None:
        """Remove lines whose answers are written."""
        with self._changed:
            for line in lines:
                entry = self._entries.pop(line)
                self._bytes -= entry.size
                self._answer_bytes -= len(entry.answer or b"")
            self._answered = [line for line in self._answered if line in self._entries]
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    @property
    def answer_bytes(self) -> int:
        """Bytes of the answers in memory."""
        with self._changed:
            return self._answer_bytes

    @property
    def _room(self) -> int:
        return MOST_LINES - len(self._entries) if self._bytes < MOST_BYTES else 0

    def _answer(self, line: int, answer: bytes) -> bool:
        entry = self._entries.get(line)
        if entry is None or entry.answer is not None:
            return False
        entry.answer = answer
        entry.size += len(answer)
        self._bytes += len(answer)
        self._answer_bytes += len(answer)
        self._finished.pop(line, None)
        if not self._ordered:
            self._answered.append(line)
        return True

    def _in_turn(self) -> Iterator[tuple[int, bytes]]:
        for line in self._answered:
            yield line, self._entries[line].answer or b""

    def _unread(self, with_gaps: bool) -> Iterator[int]:
        for line, entry in self._entries.items():
            if entry.answer is None and entry.is_finished:
                yield line
            elif entry.answer is None and not with_gaps:
                return

    def _ahead(self, with_gaps: bool) -> Iterator[tuple[int, bytes]]:
        for line, entry in self._entries.items():
            if entry.answer is not None:
                yield line, entry.answer
            elif not with_gaps:
                return
