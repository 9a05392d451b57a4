"""The answers of outstanding lines, from Redis or from the parts where they were drained before."""

from collections.abc import Mapping, Sequence

from jobs.batch.manifest import load_manifest
from jobs.batch.parts import salvage
from jobs.control.line_answer import LineAnswer, jsonl_line
from jobs.protocol.results import Result
from jobs.queue.request_queue import Queue
from pipeline.piped.outstanding import Outstanding


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
        self._parts_read: set[str] = set()

    def collect(self, lines: Sequence[int]) -> None:
        """Note the answers of lines that finished."""
        waiting = self._outstanding.unanswered(lines)
        results = self._queue.results_of(self._batch, list(waiting))
        for line, result in results.items():
            self._note(waiting, line, result)
        if len(results) < len(waiting):
            self._collect_drained()

    def collect_all(self) -> None:
        """Note the answers of all outstanding lines that finished, also those that were missed."""
        finished = self._queue.finished_of(self._batch, list(self._outstanding.unanswered()))
        self.collect(finished)
        if self._outstanding.unanswered(finished):
            self._parts_read.clear()

    def _collect_drained(self) -> None:
        manifest = load_manifest(self._root)
        parts = [] if manifest is None else [part.name for part in manifest.parts]
        # All that wait, since no part is read again
        waiting = self._outstanding.unanswered()
        for part in parts:
            if part not in self._parts_read:
                for record in salvage(self._root, part):
                    if record.line in waiting:
                        self._note(waiting, record.line, record.result)
        self._parts_read = set(parts)

    def _note(self, waiting: Mapping[int, str], line: int, result: Result) -> None:
        answer = LineAnswer(line, waiting[line], result, ("", ""))
        if self._outstanding.answer(line, jsonl_line(self._batch, answer)):
            self.failed += not result.succeeded
