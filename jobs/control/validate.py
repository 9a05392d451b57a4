"""Validate: one pass over the input that reports every bad line, or writes the plan.

A rebuilt batch continues with its finished lines here.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing

from jobs.batch.appending import take_appended
from jobs.batch.input_files import OWN_FILE, SPOOL_NAME, InputError, api_bounds, format_of, read_lines, write_spool
from jobs.batch.invalid_lines import mark_invalid
from jobs.batch.manifest import MADE, LineProblem
from jobs.batch.queued_tokens import others_tokens
from jobs.batch.recovery import restore_progress
from jobs.batch.source import note_source
from jobs.batch.source_check import Checked, ServedModels, SourceCheck, estimated_tokens, refused
from jobs.control.advance import BatchProgress, drain, feed, plan_fields
from jobs.control.early_lines import EarlyLines, discard_stale, source_stamp, stamp_in
from jobs.control.model_defaults import begin_defaults, keep_defaults
from jobs.control.slices import Slice
from jobs.store.input_formats import JSONL
from jobs.store.storage import is_local, join, new_name, open_input, sha256_of, stamp_of

_MOST_BLANK = 1_000_000  # lines; the index beside the plan has 12 bytes for each, and Redis one bit
_CHECK_LINES = 256
_REGISTRY_SECONDS = 15.0
_REGISTRY_POLL_SECONDS = 0.1


def validate(held: Slice) -> None:
    """Move the batch to `in_progress` or `failed`. Raise `StoreError`."""
    manifest = held.manifest
    if manifest.is_open:
        take_appended(manifest, held.check_current)
    elif manifest.plan_sha256 is None:
        manifest.made = "" if is_local(held.root) else new_name(held.root, MADE)
        checked = _check(held)
        if checked.problems:
            manifest.problems = checked.problems
            held.discard_early_lines()
            held.end("failed")
            return
        manifest.total, manifest.models, manifest.plan_sha256 = checked.total, checked.models, checked.plan_sha256
        manifest.endpoints, manifest.unknown_members = checked.endpoints, checked.unknown_members
        manifest.early_stamp = source_stamp(manifest)
    keep_defaults(held, manifest.models)
    has_early_lines = discard_stale(held)
    progress = restore_progress(held.queue, held.manifest, held.check_current)
    begun = {"cursor": 0, "low_water": -1, "defaults": manifest.defaults or {}}
    fields = {**plan_fields(manifest), **begun, **progress.fields}
    held.move("in_progress", fields, stamp_in(manifest), progress.done)
    if has_early_lines:
        drain(held, BatchProgress())  # first, since a full Redis accepts no lines
    record = held.record() if has_early_lines else held.fields
    feed(held, BatchProgress(), record, time.monotonic())  # the first lines, before a slice gets its turn


def _check(held: Slice) -> Checked:
    """Return the result of checking the file, or a refusal."""
    spec = held.manifest.spec
    if spec.of_api and held.manifest.problems:  # known when the batch was created
        return Checked(problems=held.manifest.problems)
    try:
        checked = _read_input(held)
    except InputError as error:
        if not spec.of_api:
            return refused("invalid_file", str(error))
        return refused("invalid_request", str(error).replace(spec.input, "The input file"), param="file_id")
    if spec.of_api and not checked.problems and not checked.total:
        message = "The input file is empty. Please ensure that your batch contains at least one request."
        return refused("empty_file", message)
    return checked


def _read_input(held: Slice) -> Checked:
    manifest = held.manifest
    location = manifest.spec.input
    before = stamp_of(location)
    if format_of(location) != JSONL or manifest.spec.skip_invalid_requests:
        manifest.input_sha256 = sha256_of(location)
        held.check_current()
        source = join(manifest.made_root, SPOOL_NAME)
        source_sha256, checked = _spool(held, source)
    else:
        digest = hashlib.sha256()
        early = EarlyLines(held, location)
        source, checked = location, check_source(held, location, digest.update, early)
        manifest.input_sha256 = source_sha256 = digest.hexdigest()
    note_source(manifest, source, source_sha256)
    if before is None or stamp_of(location) != before:
        raise InputError(f"{location} changed while it was read")
    manifest.input_bytes = before[0]
    return checked


def _spool(held: Slice, spool: str) -> tuple[str, Checked]:
    """Write the requests of the input as JSONL; return the hash of that and the check's result."""
    spec = held.manifest.spec
    source, sha256 = spec.input, ""
    if format_of(source) != JSONL:
        bounds = api_bounds(source, spec.max_lines) if spec.of_api else OWN_FILE
        source, sha256 = spool, write_spool(source, spool, bounds, held.check_current, spec.rows)
    if not spec.skip_invalid_requests:
        return sha256, check_source(held, spool)
    served = _served(held)
    with closing(SourceCheck(spec, held.manifest.made_root, served)) as check:
        sha256 = mark_invalid(spec, served, source, spool, held.check_current, check.take)
        return sha256, _outcome(held, check, spool)


def check_source(
    held: Slice, source: str, note: Callable[[bytes], object] = len, early: EarlyLines | None = None
) -> Checked:
    """Check every line of JSONL in one pass; write the plan if all are valid.

    `note` gets every byte, `early` every line.
    """
    spec = held.manifest.spec
    with (
        closing(SourceCheck(spec, held.manifest.made_root, _served(held))) as check,
        open_input(source, unchanging=not is_local(held.root)) as file,
    ):
        for count, line in enumerate(read_lines(file, note, _MOST_BLANK if spec.of_api else None)):
            if count % _CHECK_LINES == 0:
                held.check_current()
            if count == spec.max_lines:
                return refused("too_many_tasks", f"The input file holds more than {count} requests.")
            order = check.add(line)
            if early is not None:
                early.add(line, order, check.body_bytes)
        return _outcome(held, check, source)


def _outcome(held: Slice, check: SourceCheck, source: str) -> Checked:
    held.check_current()
    problems = check.problems(source)
    held.check_current()
    if held.manifest.spec.of_api and not problems:
        problems = _token_problems(held, check.body_bytes)
    return Checked(problems=problems) if problems else check.finish()


def _served(held: Slice) -> Mapping[str, Collection[str] | None]:
    """Return the models that lines may name, and set the defaults of those that are known."""
    spec = held.manifest.spec
    begin_defaults(held)
    if spec.models is not None:
        return dict.fromkeys(spec.models)

    def pause() -> None:
        held.check_current()
        time.sleep(_REGISTRY_POLL_SECONDS)

    return ServedModels(held.queue, pause, _REGISTRY_SECONDS if spec.of_api else 0.0)


def _token_problems(held: Slice, size: int) -> list[LineProblem]:
    """Record the batch's tokens, given its bytes `size`; return a problem if they exceed the limit.

    The limit is for the tenant's open batches together.
    """
    spec = held.manifest.spec
    held.manifest.queued_tokens = own = estimated_tokens(size)
    most = spec.queued_tokens
    if most is None:
        return []
    # Written before reading the others, so that one of two concurrent batches sees the other.
    held.note({"queued_tokens": own})
    others = others_tokens(held.queue, spec.tenant, held.batch)
    if own + others <= most:
        return []
    message = (
        f"About {own} tokens in this batch and {others} in others that have not ended are more than the {most} that may"
        " be queued."
    )
    return [LineProblem("token_limit_exceeded", message)]
