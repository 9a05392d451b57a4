"""Finalize: merge a batch's parts into its result files, in input order.

A repeated run writes the same bytes.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from jobs.batch.appending import requests_of, take_appended
from jobs.batch.input_files import is_csv, is_parquet, read_lines
from jobs.batch.invalid_lines import problem_of
from jobs.batch.manifest import FixedOutputs, Manifest, save_manifest
from jobs.batch.parts import drop_unlisted, merge_parts
from jobs.batch.recovery import repair, restore_progress
from jobs.batch.result_files import (
    location_to_write,
    log_output,
    may_become_log,
    publish_input,
    publish_result_files,
)
from jobs.batch.row_requests import RowExtras, read_extras
from jobs.batch.source import open_source
from jobs.control.advance import BatchProgress, drain
from jobs.control.csv_results import csv_writer
from jobs.control.line_answer import LineAnswer, jsonl_line
from jobs.control.line_results import LineWriter
from jobs.control.number_columns import NumberColumns, number_columns
from jobs.control.parquet_results import ParquetWriter
from jobs.control.slices import Slice
from jobs.errors import JobsError
from jobs.protocol.lines import read_line
from jobs.protocol.results import Usage
from jobs.store.storage import is_local, join, sweep_beside

_CHECK_LINES = 256
_WHY_UNANSWERED = {
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}
logger = logging.getLogger(__name__)


class ResultsMissing(JobsError):
    """A line of a finished batch has no result on disk, since its part was damaged."""


class Outcome(NamedTuple):
    """The written files; a location is None if no file was written."""

    completed: int
    failed: int
    usage: Usage
    output: str | None
    error_output: str | None


def finalize(held: Slice) -> None:
    """Move the batch to the end state of its outcome. Raise `StoreError`."""
    manifest = held.manifest
    manifest.outcome = "cancelled" if held.state == "cancelling" else held.fields.outcome
    manifest.timestamps.setdefault(held.state, held.fields.timestamps[held.state])
    if manifest.outcome != "completed":
        held.queue.remove_unfinished(held.batch)
    if manifest.is_open:
        requests_of(manifest.spec).close()
        take_appended(manifest, held.check_current)
        save_manifest(manifest)
    if manifest.plan_sha256 is None or held.fields.early not in ("", manifest.early_stamp):
        held.discard_early_lines()
    progress = BatchProgress()
    while manifest.fixed is None and drain(held, progress, everything=True):
        held.check_current()
    try:
        outcome = Outcome(0, 0, Usage(), None, None) if manifest.plan_sha256 is None else _write_results(held)
    except ResultsMissing as error:
        logger.error("batch %s: %s; running the lines without a result again", held.batch, error)
        run_again(held)
        return
    manifest.completed, manifest.failed, manifest.usage, manifest.output, manifest.error_output = outcome
    held.end(manifest.outcome)


def _write_results(held: Slice) -> Outcome:
    """Write the outputs; those of an API batch become files in the file store.

    Raise `StoreError` or `ResultsMissing`.
    """
    manifest = held.manifest
    if manifest.spec.output_file_id is None:
        return write_outputs(manifest, held.check_current)
    fixed = _outputs(held)
    if manifest.spec.streams_input and manifest.total:
        publish_input(held.queue, manifest)
    publish_result_files(held.queue, manifest, fixed.output, fixed.error_output, fixed.ended_at)
    return Outcome(fixed.completed, fixed.failed, fixed.usage, fixed.output, fixed.error_output)


def _outputs(held: Slice) -> FixedOutputs:
    """Write the outputs of an API batch, unless they are fixed already.

    In a bucket they are fixed before a client can see them: a process that was presumed dead may
    resume while another gives the batch a different end.
    """
    manifest = held.manifest
    if manifest.fixed is not None:
        return manifest.fixed
    outcome = write_outputs(manifest, held.check_current)
    if outcome.output is not None and may_become_log(manifest):
        log_output(manifest, outcome.output)
    fixed = FixedOutputs(*outcome, manifest.timestamps[held.state])
    if not is_local(held.root):
        manifest.fixed = fixed
        save_manifest(manifest)
    return fixed


def run_again(held: Slice) -> None:
    """Move a batch with damaged parts back to `in_progress`, with the readable results."""
    manifest = held.manifest
    repair(manifest)
    save_manifest(manifest)
    drop_unlisted(held.root, manifest.parts, manifest.next_part)
    manifest.timestamps.pop("finalizing", None)
    progress = restore_progress(held.queue, held.manifest, held.check_current)
    counts = {"completed": 0, "failed": 0, "restored": True, **progress.fields}
    fields = {**counts, "cursor": 0, "open_models": held.fields.line_models, "passed_over": []}
    held.move("in_progress", fields, done=progress.done)


def write_outputs(manifest: Manifest, check: Callable[[], None]) -> Outcome:
    """Write the output and error files durably, calling `check` often.

    Raise `StoreError`, `ResultsMissing` or what `check` raises.
    """
    spec = manifest.spec
    output = spec.output or join(spec.root, "output.parquet" if is_parquet(spec.input) else "output.jsonl")
    inline = spec.error_file == "inline"
    error_output = None if inline else spec.error_output or join(spec.root, "errors.jsonl")
    output = location_to_write(manifest, output)
    error_output = error_output and location_to_write(manifest, error_output)
    for location in filter(None, (output, error_output)):
        sweep_beside(location)
    counts = {True: 0, False: 0}
    usage = Usage()
    numbers = number_columns(manifest, check) if is_parquet(output) else NumberColumns()
    with _writer(manifest, output, numbers) as good, _writer(manifest, error_output or output) as bad:
        for number, answer in enumerate(_answers(manifest)):
            if number % _CHECK_LINES == 0:
                check()
            succeeded = answer.result is not None and answer.result.succeeded
            counts[succeeded] += 1
            if answer.result is not None:
                usage = usage.plus(answer.result.usage)
            (good if succeeded or inline else bad).add(answer)
        with_output, with_errors = inline or counts[True] > 0, not inline and counts[False] > 0
        if with_output:
            good.commit()
        if with_errors:
            bad.commit()
    return Outcome(
        counts[True],
        counts[False],
        usage,
        output if with_output else None,
        error_output if with_errors else None,
    )


def _answers(manifest: Manifest) -> Iterator[LineAnswer]:
    """Yield every line of the source with its result.

    Raise `ResultsMissing` if a completed batch lacks one.
    """
    why = _WHY_UNANSWERED.get(manifest.outcome)
    records = merge_parts(manifest.spec.root, manifest.parts)
    record = next(records, None)
    with open_source(manifest) as file:
        for number, _, raw in read_lines(file):
            custom_id = read_line(raw or b"").custom_id
            row = RowExtras() if manifest.spec.rows is None else read_extras(raw or b"")
            while record is not None and record.line < number:
                record = next(records, None)
            if record is not None and record.line == number:
                problem = row.problem(number)
                if manifest.spec.skip_invalid_requests and not record.result.succeeded:
                    problem = problem_of(raw or b"") or problem
                result = problem.result(record.result.request_id) if problem else record.result
                yield LineAnswer(number, custom_id, result, ("", ""), row.columns)
            elif why is not None:
                yield LineAnswer(number, custom_id, None, why, row.columns)
            else:
                raise ResultsMissing(f"the results of line {number} and perhaps others were lost with a damaged part")


def _writer(manifest: Manifest, location: str, numbers: NumberColumns | None = None) -> LineWriter | ParquetWriter:
    if is_parquet(location):
        return ParquetWriter(manifest, location, numbers or NumberColumns())
    if is_csv(location):
        return csv_writer(manifest, location)
    return LineWriter(manifest, location, partial(jsonl_line, manifest.batch_id))
