"""Validate: one pass over the input that names every bad line, or makes the plan; a rebuilt batch
takes up its finished lines here.
"""

import contextlib
import hashlib
import heapq
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from jobs.batch.input_files import (
    MAX_LINE_BYTES,
    OWN_FILE,
    SPOOL_NAME,
    Bounds,
    InputError,
    InputLine,
    needs_spool,
    read_lines,
    write_spool,
)
from jobs.batch.line_index import LineIndexWriter
from jobs.batch.manifest import BatchSpec, LineProblem
from jobs.batch.plan import PLAN_NAME, PlanBuilder, PlanEntry, Sorter
from jobs.batch.recovery import restore_progress
from jobs.batch.source import note_source
from jobs.control.slices import Slice, process_queue, run_long
from jobs.protocol import fields
from jobs.protocol.lines import read_line
from jobs.protocol.states import states_of
from jobs.protocol.validation import LineError, LineRequest, check_batch_line, check_line
from jobs.queue.tasks import enqueue
from jobs.store.storage import join, local_path, open_input, sha256_of, size_of, stamp_of

MAX_PROBLEMS = 1000

_UNPACKED_BYTES = 2 << 30  # of a compressed or Parquet file of the API, or
_UNPACKED_TIMES = 10  # its size so many times if that is more
_PARQUET_MEMORY_BYTES = 1 << 30
_PARQUET_CPU_SECONDS = 120
_MOST_BLANK = 1_000_000  # lines; the index beside the plan has 12 bytes for each, and Redis one bit
_CHECK_LINES = 1024
_ID_RECORD_BYTES = 24  # hash of the custom_id, line, offset, length
_BYTES_PER_TOKEN = 4  # as `claim.lua` guesses
_REGISTRY_SECONDS = 10.0
_REGISTRY_POLL_SECONDS = 0.1


class Checked(NamedTuple):
    """What a pass over the lines found; `problems` is empty for a file that may run."""

    total: int
    models: list[str]
    problems: list[LineProblem]
    plan_sha256: str


def run(batch: str, generation: int) -> None:
    """The RQ job."""
    run_long(process_queue(), batch, generation, states_of("validate"), validate)


def validate(held: Slice) -> None:
    """Move the batch to `in_progress` or `failed`. Raise `StoreError`."""
    manifest = held.manifest
    if manifest.plan_sha256 is None:
        checked = _check(held)
        if checked.problems:
            manifest.problems = checked.problems
            held.end("failed")
            return
        manifest.total, manifest.models, manifest.plan_sha256 = checked.total, checked.models, checked.plan_sha256
    progress = restore_progress(held.queue, held.manifest, held.check_current)
    held.move("in_progress", {"total": manifest.total, "line_models": manifest.models, "cursor": 0, **progress})
    enqueue(held.queue.redis, "advance", held.batch, held.generation)


def _check(held: Slice) -> Checked:
    """What the file holds, or why it is refused."""
    spec = held.manifest.spec
    if spec.of_api and held.manifest.problems:  # known when the batch was made
        return _refused(held.manifest.problems[0])
    try:
        checked = _read_input(held)
    except InputError as error:
        if not spec.of_api:
            return _refused(LineProblem("invalid_file", str(error)))
        return _refused(
            LineProblem("invalid_request", str(error).replace(spec.input, "The input file"), None, "file_id")
        )
    if spec.of_api and not checked.problems and not checked.total:
        return _refused(LineProblem("empty_file", "The input file holds no requests."))
    return checked


def _refused(problem: LineProblem) -> Checked:
    return Checked(0, [], [problem], "")


def _read_input(held: Slice) -> Checked:
    manifest = held.manifest
    location = manifest.spec.input
    before = stamp_of(location)
    if needs_spool(location):
        manifest.input_sha256 = sha256_of(location)
        held.check_current()
        source = join(held.root, SPOOL_NAME)
        source_sha256 = write_spool(location, source, _bounds_of(manifest.spec), held.check_current)
        checked = check_source(held, source)
    else:
        digest = hashlib.sha256()
        source, checked = location, check_source(held, location, digest.update)
        manifest.input_sha256 = source_sha256 = digest.hexdigest()
    note_source(manifest, source, source_sha256)
    if before is None or stamp_of(location) != before:
        raise InputError(f"{location} changed while it was read")
    manifest.input_bytes = before[0]
    return checked


def _bounds_of(spec: BatchSpec) -> Bounds:
    """What it may cost to unpack the input: that of the API is a stranger's."""
    if not spec.of_api:
        return OWN_FILE
    most_bytes = max(_UNPACKED_BYTES, _UNPACKED_TIMES * (size_of(spec.input) or 0))
    # One more, so that there are too many
    most_rows = None if spec.max_lines is None else spec.max_lines + 1
    return Bounds(most_bytes, most_rows, _PARQUET_MEMORY_BYTES, _PARQUET_CPU_SECONDS)


def check_source(held: Slice, source: str, note: Callable[[bytes], object] = len) -> Checked:
    """One pass over JSONL: problems in line order, at most `MAX_PROBLEMS` of them and a note of how
    many more there are.

    `note` is handed every byte.
    """
    spec = held.manifest.spec
    of_api = spec.of_api
    served = set(spec.models) if spec.models is not None else known_models(held, _REGISTRY_SECONDS if of_api else 0.0)
    folder = local_path(held.root)
    findings = _Findings()
    with contextlib.ExitStack() as stack:
        plan, ids = stack.enter_context(closing(PlanBuilder(folder))), stack.enter_context(closing(_CustomIds(folder)))
        index = stack.enter_context(closing(LineIndexWriter(held.root))) if of_api else None
        file = stack.enter_context(open_input(source))
        for count, line in enumerate(read_lines(file, note, _MOST_BLANK if of_api else None)):
            if count % _CHECK_LINES == 0:
                held.check_current()
            if spec.max_lines is not None and count == spec.max_lines:
                return _refused(
                    LineProblem("too_many_tasks", f"The input file holds more than {spec.max_lines} requests.")
                )
            found = _check_line(line, spec, served)
            if isinstance(found, LineError):
                findings.add_error(found)
                continue
            entry = PlanEntry(line.number, line.offset, len(line.raw or b""))
            ids.add(found.custom_id, entry)
            plan.add(entry, found.model, found.values)
            if index is not None:
                index.add(entry)
            findings.add_request(found)
        held.check_current()
        problems = findings.problems(*ids.duplicates(source))
        held.check_current()
        if of_api and not problems and (too_many := _token_problem(held, findings.body_bytes)):
            problems.append(too_many)
        if problems:
            return Checked(0, [], problems, "")
        if index is not None:
            index.commit()
        return Checked(plan.lines, sorted(findings.models), [], plan.write(join(held.root, PLAN_NAME)))


def known_models(held: Slice, patience: float) -> set[str]:
    """Models that are or were served.

    Where there is none it waits for one: an emptied Redis gets them as leases are renewed.
    """
    deadline = time.monotonic() + min(held.queue.settings.lease_seconds / 3, patience)
    while not (models := {model.name for model in held.queue.models()}) and time.monotonic() < deadline:
        held.check_current()
        time.sleep(_REGISTRY_POLL_SECONDS)
    return models


def _token_problem(held: Slice, size: int) -> LineProblem | None:
    """Return whether the tenant's open batches, with this one of `size` bytes, would hold more
    tokens than they may; note how many it holds.
    """
    spec = held.manifest.spec
    held.manifest.queued_tokens = own = -(-size // _BYTES_PER_TOKEN)
    # Before the others are looked at, so that of two at once one sees the other
    held.note({"queued_tokens": own})
    most = spec.queued_tokens
    if most is None:
        return None
    others = sum(tokens for batch, tokens in held.queue.open_tokens(spec.tenant).items() if batch != held.batch)
    if own + others <= most:
        return None
    message = (
        f"About {own} tokens in this batch and {others} in others that have not ended are more than the {most} that may"
        " be queued."
    )
    return LineProblem("token_limit_exceeded", message)


def _check_line(line: InputLine, spec: BatchSpec, served: set[str]) -> LineRequest | LineError:
    of_api = spec.of_api
    if line.raw is None:
        code = "invalid_request" if of_api else "line_too_long"
        return LineError(code, line.number, None, f"This line is longer than {MAX_LINE_BYTES} bytes.")
    if of_api:
        return check_batch_line(line.raw, line.number, spec.endpoint, served)
    return check_line(line.raw, line.number, spec.endpoint, served, spec.default_model)


class _Findings:
    """What one pass found so far: bad lines, of which at most `MAX_PROBLEMS` are kept, models,
    and bytes of bodies.
    """

    def __init__(self) -> None:
        self.models: set[str] = set()
        self.body_bytes = 0
        self._problems: list[LineProblem] = []
        self._bad = 0

    def add_error(self, error: LineError) -> None:
        self._bad += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(LineProblem(error.code, error.message, error.line, error.param))

    def add_request(self, request: LineRequest) -> None:
        self.models.add(request.model)
        self.body_bytes += len(request.body)

    def problems(self, repeated: int, duplicates: list[LineProblem]) -> list[LineProblem]:
        """Return the problems in line order, `duplicates` among them, and a note of how many more
        lines are bad.

        `repeated` counts the lines with a duplicate.
        """
        problems = sorted([*self._problems, *duplicates], key=lambda problem: problem.line or 0)[:MAX_PROBLEMS]
        more = self._bad + repeated - len(problems)
        if more > 0:
            message = f"{more} more lines are bad; the first {len(problems)} are listed."
            problems.append(LineProblem("too_many_errors", message))
        return problems


class _CustomIds:
    """Finds repeated custom_ids with 24 bytes per line, most of them on disk."""

    def __init__(self, folder: Path | None) -> None:
        self._sorter = Sorter(_ID_RECORD_BYTES, folder)

    def add(self, custom_id: str, entry: PlanEntry) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        self._sorter.add(
            digest + entry.line.to_bytes(4, "big") + entry.offset.to_bytes(8, "big") + entry.length.to_bytes(4, "big")
        )

    def duplicates(self, source: str) -> tuple[int, list[LineProblem]]:
        """How many lines repeat an earlier one's, and problems for the first `MAX_PROBLEMS` of
        them.
        """
        count = 0
        first_lines: list[tuple[int, PlanEntry, PlanEntry]] = []  # heap, the highest line on top
        original = b""
        for record in self._sorter:
            if record[:8] != original[:8]:
                original = record
                continue
            count += 1
            entry = _entry(record)
            item = (-entry.line, entry, _entry(original))
            if len(first_lines) < MAX_PROBLEMS:
                heapq.heappush(first_lines, item)
            else:
                heapq.heappushpop(first_lines, item)
        return count, _describe(source, sorted(first_lines, reverse=True))

    def close(self) -> None:
        self._sorter.close()


def _entry(record: bytes) -> PlanEntry:
    return PlanEntry(
        int.from_bytes(record[8:12], "big"), int.from_bytes(record[12:20], "big"), int.from_bytes(record[20:24], "big")
    )


def _describe(source: str, found: list[tuple[int, PlanEntry, PlanEntry]]) -> list[LineProblem]:
    if not found:
        return []
    problems = []
    with open_input(source) as file:
        for _, entry, original in found:
            file.seek(entry.offset)
            custom_id = read_line(file.read(entry.length)).custom_id
            message = f"Duplicate custom_id '{fields.shown(custom_id)}': line {original.line} has it already."
            problems.append(LineProblem("duplicate_custom_id", message, entry.line, "custom_id"))
    return problems
