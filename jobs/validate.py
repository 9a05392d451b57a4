"""Validate: one pass over the input that names every bad line, or makes the plan; a rebuilt batch takes up its finished lines here."""

import contextlib
import hashlib
import heapq
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from jobs import fields
from jobs.control import Slice, enqueue, process_queue, run_long
from jobs.files import MAX_LINE_BYTES, SPOOL_NAME, InputError, InputLine, needs_spool, read_lines, write_spool
from jobs.lines import decode_json, read_line
from jobs.manifest import LineProblem
from jobs.plan import PLAN_NAME, PlanBuilder, PlanEntry, Sorter
from jobs.recovery import restore_progress
from jobs.source import note_source
from jobs.storage import join, local_path, open_input, sha256_of, stamp_of
from jobs.validation import LineError, LineRequest, check_line

MAX_PROBLEMS = 1000

_BEAT_LINES = 1024
_ID_RECORD_BYTES = 24  # hash of the custom_id, line, offset, length


class Checked(NamedTuple):
    """What a pass over the lines found; `problems` is empty for a file that may run."""

    total: int
    models: list[str]
    problems: list[LineProblem]
    plan_sha256: str


def run(batch: str, generation: int) -> None:
    """The RQ job."""
    run_long(process_queue(), batch, generation, ("validating",), validate)


def validate(held: Slice) -> None:
    """Moves the batch to `in_progress` or `failed`. Raises `StoreError`."""
    manifest = held.manifest
    if manifest.plan_sha256 is None:
        try:
            checked = _read_input(held)
        except InputError as error:
            checked = Checked(0, [], [LineProblem("invalid_file", str(error))], "")
        if checked.problems:
            manifest.problems = checked.problems
            errors = msgspec.json.encode(checked.problems).decode()
            held.end("failed", {"errors": errors, "total": 0})
            return
        manifest.total, manifest.models, manifest.plan_sha256 = checked.total, checked.models, checked.plan_sha256
    progress = restore_progress(held)
    models = msgspec.json.encode(manifest.models).decode()
    held.move("in_progress", {"total": manifest.total, "line_models": models, "cursor": 0, **progress})
    enqueue(held.queue.redis, "advance", held.batch, held.generation)


def _read_input(held: Slice) -> Checked:
    manifest = held.manifest
    location = manifest.spec.input
    before = stamp_of(location)
    if needs_spool(location):
        manifest.input_sha256 = sha256_of(location)
        held.beat()
        source = join(held.root, SPOOL_NAME)
        source_sha256 = write_spool(location, source)
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


def check_source(held: Slice, source: str, note: Callable[[bytes], object] = len) -> Checked:
    """One pass over JSONL: problems in line order, at most `MAX_PROBLEMS` of them and a note of how many more there are.

    `note` is handed every byte.
    """
    spec = held.manifest.spec
    served = set(spec.models) if spec.models is not None else {model.name for model in held.queue.models()}
    folder = local_path(held.root)
    problems: list[LineProblem] = []
    models: set[str] = set()
    bad = 0
    with contextlib.closing(PlanBuilder(folder)) as plan, contextlib.closing(_CustomIds(folder)) as ids, open_input(source) as file:
        for count, line in enumerate(read_lines(file, note)):
            if count % _BEAT_LINES == 0:
                held.beat()
            found = _check(line, spec.endpoint, spec.default_model, served)
            if isinstance(found, LineError):
                bad += 1
                if len(problems) < MAX_PROBLEMS:
                    problems.append(LineProblem(found.code, found.message, found.line, found.param))
                continue
            entry = PlanEntry(line.number, line.offset, len(line.raw or b""))
            ids.add(found.custom_id, entry)
            plan.add(entry, found.model, decode_json(found.body))
            models.add(found.model)
        held.beat()
        repeated, duplicates = ids.duplicates(source)
        problems = sorted([*problems, *duplicates], key=lambda problem: problem.line or 0)[:MAX_PROBLEMS]
        bad += repeated
        if bad > len(problems):
            more = f"{bad - len(problems)} more lines are bad; the first {len(problems)} are listed."
            problems.append(LineProblem("too_many_errors", more))
        held.beat()
        sha256 = "" if problems else plan.write(join(held.root, PLAN_NAME))
        return Checked(plan.lines, sorted(models), problems, sha256)


def _check(line: InputLine, endpoint: str | None, default_model: str | None, served: set[str]) -> LineRequest | LineError:
    if line.raw is None:
        return LineError("line_too_long", line.number, None, f"This line is longer than {MAX_LINE_BYTES} bytes.")
    return check_line(line.raw, line.number, endpoint, served, default_model)


class _CustomIds:
    """Finds repeated custom_ids with 24 bytes per line, most of them on disk."""

    def __init__(self, folder: Path | None) -> None:
        self._sorter = Sorter(_ID_RECORD_BYTES, folder)

    def add(self, custom_id: str, entry: PlanEntry) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        self._sorter.add(digest + entry.line.to_bytes(4, "big") + entry.offset.to_bytes(8, "big") + entry.length.to_bytes(4, "big"))

    def duplicates(self, source: str) -> tuple[int, list[LineProblem]]:
        """How many lines repeat an earlier one's, and problems for the first `MAX_PROBLEMS` of them."""
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
    return PlanEntry(int.from_bytes(record[8:12], "big"), int.from_bytes(record[12:20], "big"), int.from_bytes(record[20:24], "big"))


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
