"""Appending of lines of stdin to the open batch, and feeding them to its workers at once."""

import contextlib
import hashlib
import heapq
import itertools
import time
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from jobs.batch.bitmap import Bitmap
from jobs.batch.input_files import InputLine
from jobs.batch.invalid_lines import problem_of
from jobs.batch.manifest import BatchSpec, LineProblem, load_manifest
from jobs.batch.open_requests import AppendBounds, AppendOutcome, OpenRequests
from jobs.batch.plan import PLAN_NAME, PlanEntry, read_plan
from jobs.batch.source_check import duplicate_of
from jobs.control.advance import request_of
from jobs.control.line_answer import LineAnswer, jsonl_line
from jobs.protocol.lines import decode_json, read_line
from jobs.protocol.results import ApiError, batch_request_id, new_request_id, output_line
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.queue.tasks import wake
from jobs.store.storage import join, open_input
from pipeline.errors import Refused
from pipeline.piped.outstanding import Outstanding


class _Added(NamedTuple):
    """A line that is new in the batch."""

    line: int  # its number in the batch
    custom_id: str
    content: bytes  # in its stored form


class LineIntake:
    """Appends lines of stdin. Methods raise `StoreError` and `QueueUnavailable`.

    Counters:
    - `read`: lines read from stdin
    - `answered`: repeated lines whose answers were written by an earlier run
    - `earlier`: unanswered lines of earlier runs that are not resumed yet
    - `failed`: invalid lines, and errors among the `answered` lines

    `are_new` is true if the record of the batch may not count the last lines yet.
    """

    def __init__(self, queue: Queue, batch: str, spec: BatchSpec, outstanding: Outstanding, durable: bool) -> None:
        self.read = self.failed = self.answered = self.earlier = 0
        self.are_new = False
        self._queue = queue
        self._batch = batch
        self._spec = spec
        self._served = dict.fromkeys(spec.models or ())
        self._outstanding = outstanding
        self._requests = OpenRequests(spec, durable, keeps_open=True)
        manifest = load_manifest(spec.root)
        self._defaults = None if manifest is None else manifest.defaults
        self._before = 0  # lines of earlier runs
        self._again = Bitmap()  # lines of earlier runs that were read again
        self._written = self._failed = Bitmap()
        self._refused: Container[str] = ()

    def resume(self, written: Bitmap, failed: Bitmap, refused: Container[str] = ()) -> bool:
        """Resume the lines of earlier runs that are not `written`; return whether all were resumed.

        `failed` are the written lines whose answers are errors. `refused` are the invalid lines,
        outside of the batch, that have their answers.
        """
        self._written, self._failed, self._refused = written, failed, refused
        self._before = self._requests.committed().lines
        self.earlier = self._before - written.count()
        if self.earlier < 0:
            raise Refused(f"the output has answers of lines that {self._spec.root} does not have: remove both")
        with open_input(self._spec.input, False) as source:
            for line, offset, length in self._unwritten(written):
                if not self._outstanding.wait_for_room():
                    return False
                source.seek(offset)
                content = source.read(length)
                self._add(_Added(line, read_line(content).custom_id, content))
                self.earlier -= 1
        return True

    def _unwritten(self, written: Bitmap) -> Iterator[PlanEntry]:
        """Yield the unwritten lines in input order.

        The plan moves a line by less than `MAX_ITEMS` places, since it orders only lines that were
        appended together.
        """
        near: list[PlanEntry] = []
        for place, entry in enumerate(self._planned(), 1):
            if entry.line not in written:
                heapq.heappush(near, entry)
            while near and near[0].line <= place - MAX_ITEMS:
                yield heapq.heappop(near)
        yield from sorted(near)

    def _planned(self) -> Iterator[PlanEntry]:
        with open_input(join(self._spec.root, PLAN_NAME)) as plan:
            for start in range(0, self._before, MAX_ITEMS):
                yield from read_plan(plan, start, min(MAX_ITEMS, self._before - start))

    def take(self, lines: Sequence[InputLine]) -> bool:
        """Append at most `MAX_ITEMS` lines, and feed them to the workers.

        A line of an earlier run keeps the answer of that run; a second copy is a duplicate in both
        runs. Return whether some lines failed at once, so that their answers can be written.
        """
        failed = self.failed
        checked = self._requests.check(lines, self._served, AppendBounds())
        [outcome] = self._requests.commit([checked])
        assert isinstance(outcome, AppendOutcome), "there are no bounds"
        problems = {problem.line: problem for problem in outcome.problems}
        old = problems.keys() | checked.repeats.keys()
        fresh = [new for new in checked.lines.values() if new.number not in old]
        numbers = itertools.count(outcome.total - outcome.appended + 1)
        added = {new.number: _Added(next(numbers), new.custom_id, new.content) for new in fresh}
        for line in lines:
            if (problem := problems.get(line.number)) is not None:
                self._refuse(line, problem)
            elif (original := checked.repeats.get(line.number)) is None:
                self._add(added[line.number])
            elif original <= self._before and original not in self._again:
                self._again.add(original)
                self.answered += original in self._written
                self.failed += original in self._failed
            else:
                self._refuse(line, duplicate_of(_custom_id(line.raw) or "", line.number, original))
        self.read += len(lines)
        if added:
            planned = (checked.lines[place].number for place in checked.order)
            self._feed([added[number] for number in planned if number in added], outcome.total)
        return self.failed > failed

    def _add(self, appended: _Added) -> None:
        answer = None
        if (problem := problem_of(appended.content)) is not None:
            self.failed += 1
            result = problem.result(new_request_id())
            answer = jsonl_line(self._batch, LineAnswer(appended.line, appended.custom_id, result, ("", "")))
        self._outstanding.add(appended.line, appended.custom_id, len(appended.content), answer)

    def _refuse(self, line: InputLine, problem: LineProblem) -> None:
        """Answer a line that is rejected from the batch, unless an earlier run did."""
        digest = hashlib.blake2b(line.raw or b"", digest_size=8).hexdigest()
        self.failed += 1
        if (name := f"stdin_{line.number}_{digest}") in self._refused:
            self.answered += 1
            return
        error = ApiError(400, f"Line {line.number}: {problem.message}", param=problem.param, code=problem.code)
        custom_id, request_id = _custom_id(line.raw), f"{batch_request_id(self._batch, 0)[:-1]}{name}"
        answer = output_line(custom_id, error.result(new_request_id()), request_id) + b"\n"
        self._outstanding.add(-line.number, custom_id or "", 0, answer)

    def _feed(self, lines: list[_Added], total: int) -> None:
        """Ingest the lines directly, if all earlier lines were ingested.

        Otherwise the control plane ingests them, as for any batch.
        """
        now = time.time()
        rows = [(one.line, request_of(self._spec, one.line, one.content, now, self._defaults)) for one in lines]
        if not self._queue.ingest(self._batch, rows, total - len(rows), total):
            wake(self._queue.redis, self._batch)
        self.are_new = True


def _custom_id(raw: bytes | None) -> str | None:
    """Return the custom_id of a line, or None if it cannot be read."""
    with contextlib.suppress(ValueError):
        values = decode_json(raw or b"")
        if isinstance(values, dict) and isinstance(found := values.get("custom_id"), str):
            return found
    return None
