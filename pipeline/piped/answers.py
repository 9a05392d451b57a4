"""The answers of outstanding lines, from Redis or from the parts where they were drained before."""

import heapq
from collections.abc import Sequence

from jobs.batch.manifest import load_manifest
from jobs.batch.parts import PartDamaged, PartIndex
from jobs.control.line_answer import LineAnswer, jsonl_line
from jobs.protocol.requests import unpack_result
from jobs.protocol.results import Result
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from pipeline.piped.outstanding import Outstanding

_MOST_BYTES = 8 * 1024 * 1024
"""Of answers that are read before they are written: the one with which they get there is the
last."""


class AnswerReader:
    """Brings the answers of one batch to `outstanding`. Raises `QueueUnavailable` and
    `StoreError`.
    """

    def __init__(self, queue: Queue, batch: str, root: str, outstanding: Outstanding) -> None:
        self.failed = 0
        self._queue = queue
        self._batch = batch
        self._root = root
        self._outstanding = outstanding
        self._parts: dict[str, PartIndex] = {}
        self._missing: set[int] = set()

    def collect(self, lines: Sequence[int]) -> None:
        """Note lines that finished."""
        self._outstanding.finish(lines)

    def collect_all(self) -> None:
        """Note all outstanding lines that finished, also those that were missed."""
        self.collect(self._queue.finished_of(self._batch, list(self._outstanding.unanswered())))

    def read(self, with_gaps: bool = False) -> bool:
        """Read answers that may be written next, of some MiB; return whether there were any.

        Raise `PartDamaged` for one that is twice in none of the places where it should be: once,
        parts may just be made one.
        """
        wanted = self._outstanding.to_read(MAX_ITEMS, with_gaps)
        if not wanted:
            return False
        most_bytes = max(1, _MOST_BYTES - self._outstanding.answer_bytes)
        results = self._queue.results_of(self._batch, list(wanted), most_bytes)
        found = {line: result for line, result in zip(wanted, results, strict=False) if result is not None}
        drained = sorted(line for line, result in zip(wanted, results, strict=False) if result is None)
        left = self._read_drained(drained, found) if drained else set()
        for line, result in found.items():
            answer = LineAnswer(line, wanted[line], result, ("", ""))
            if self._outstanding.answer(line, jsonl_line(self._batch, answer)):
                self.failed += not result.succeeded
        if left:
            self._note_missing(left)
        return True

    def _read_drained(self, lines: list[int], found: dict[int, Result]) -> set[int]:
        """Find results of lines, which ascend, in the parts; return those that no part has."""
        manifest = load_manifest(self._root)
        names = [] if manifest is None else [part.name for part in manifest.parts]
        kept = {name: part for name, part in self._parts.items() if part.damage is None}
        self._parts = {name: kept.get(name) or PartIndex(self._root, name) for name in names}
        left, size = set(lines), 0
        for record in heapq.merge(*(part.records(lines) for part in self._parts.values())):
            found.setdefault(record.line, unpack_result(record.packed))
            left.discard(record.line)
            size += len(record.packed)
            if size >= _MOST_BYTES:
                return set()
        return left

    def _note_missing(self, lines: set[int]) -> None:
        """Wait for them again: Redis may have lost that they finished."""
        self._outstanding.finish(lines, is_finished=False)
        missing = set(self._queue.finished_of(self._batch, sorted(lines)))
        twice = self._missing & missing
        self._missing |= missing
        if twice:
            damage = next((part.damage for part in self._parts.values() if part.damage), "no part has it")
            raise PartDamaged(f"the answer of line {min(twice)} of {self._batch} cannot be read: {damage}")
