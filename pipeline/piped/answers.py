"""The answers of outstanding lines, from Redis or from the parts into which they were drained."""

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
"""Size of answers read before they are written; the last one may exceed it."""


class AnswerReader:
    """Adds the answers of one batch to `outstanding`.

    Methods raise `QueueUnavailable` and `StoreError`.
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
        """Record finished lines."""
        self._outstanding.finish(lines)

    def collect_all(self) -> None:
        """Record all finished outstanding lines, including lines missed by `collect`."""
        self.collect(self._queue.finished_of(self._batch, list(self._outstanding.unanswered())))

    def read(self, with_gaps: bool = False) -> bool:
        """Read some MiB of answers that may be written next; return whether there were any.

        Raise `PartDamaged` if an answer is missing from Redis and the parts at two reads; at one
        read, the parts may just be being merged.
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
        """Add results of the ascending lines from the parts to `found`; return missing lines."""
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
        """Mark lines as unfinished again, since Redis may have lost their answers.

        Raise `PartDamaged` for a finished line that is missing for the second time.
        """
        self._outstanding.finish(lines, is_finished=False)
        missing = set(self._queue.finished_of(self._batch, sorted(lines)))
        twice = self._missing & missing
        self._missing |= missing
        if twice:
            damage = next((part.damage for part in self._parts.values() if part.damage), "no part has it")
            raise PartDamaged(f"the answer of line {min(twice)} of {self._batch} cannot be read: {damage}")
