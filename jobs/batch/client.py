"""Batches as a client sees them: create, look at, cancel.

Synchronous; `redis` is a client of `jobs.queue.connection.connect`. `jobs.batch.submit` makes those
that come through the API.

A batch is defined by its root folder (`jobs.batch.manifest`); the record in Redis follows it
and can be made again.
"""

import contextlib
import itertools
import logging
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

from jobs.batch.bitmap import Bitmap
from jobs.batch.ending import begin_cancel
from jobs.batch.lost import end_lost, why_lost
from jobs.batch.manifest import (
    BatchSpec,
    LineProblem,
    Manifest,
    end_fields,
    load_manifest,
    mark_cancelled,
    progress_fields,
    unmark_cancelled,
)
from jobs.batch.parts import drop_unlisted, merge_parts, write_records
from jobs.batch.plan import PLAN_NAME
from jobs.batch.recovery import repair
from jobs.batch.register import register
from jobs.batch.source import is_whole
from jobs.errors import JobsError
from jobs.protocol.results import Usage
from jobs.protocol.states import CANCELLABLE, END_STATES, JOBS, EndState, State
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import persistently
from jobs.queue.settings import QueueSettings
from jobs.store.storage import (
    Busy,
    StoreError,
    absolute,
    exclusive,
    join,
    local_path,
    make_folder,
    open_input,
    sha256_of,
    size_of,
    sweep,
)

__all__ = [
    "BatchRecord",
    "BatchRefused",
    "BatchSpec",
    "Busy",
    "InputChanged",
    "LineProblem",
    "StoreError",
    "cancel_batch",
    "create_batch",
    "get_batch",
    "list_batches",
]

_PATIENCE_SECONDS = 5.0
_COMPRESSED = (".gz", ".zst")
_UNREADABLE = LineProblem(
    "errors_unavailable", "The list of what is wrong with the input file cannot be read just now."
)
_LOST = LineProblem("batch_lost", "The files of this batch are gone from the server, so it cannot be finished.")

logger = logging.getLogger(__name__)


class BatchRefused(JobsError):
    """The batch cannot be made; the text is one sentence."""

    exit_code = 2


class InputChanged(BatchRefused):
    """The folder holds results of another input, or of other settings."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch at one moment.

    Counts are lines; timestamps are unix seconds by state (`created`, `in_progress`, …, `expires`).
    """

    id: str
    state: State
    outcome: EndState  # what it ends as, as far as is known
    spec: BatchSpec
    total: int
    completed: int
    failed: int
    # This and the next: those of them that are on disk, which no loss of Redis takes back
    stored_completed: int
    stored_failed: int
    models: list[str]  # that the lines name; empty until the file was validated
    waiting: int  # in Redis, for a worker
    running: int
    errors: list[LineProblem]
    usage: Usage  # of the lines on disk; final once the state is
    timestamps: dict[str, float]
    output: str | None
    error_output: str | None
    output_file_id: str | None  # once it can be read: from the first success that was logged
    error_file_id: str | None
    problem: str | None  # why it makes no progress: a full disk, a missing file; it is retried

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in END_STATES


class BatchPage(NamedTuple):
    """A part of a listing."""

    items: list[BatchRecord]
    has_more: bool


def create_batch(
    client: redis.Redis, spec: BatchSpec, batch_id: str | None = None, retry_failed: bool = False
) -> BatchRecord:
    """Make a batch, or take up the one in `spec.root`: what is done of it stays done, except
    answers of status 500 and above.

    With `retry_failed` every failed line runs again. A batch that runs already is returned as it
    is. The manifest is on disk before the record is in Redis. Raises `BatchRefused` (`InputChanged`
    when the root belongs to another input), `Busy` and `StoreError`.
    """
    spec = _with_absolute_locations(spec)
    _check_locations(spec)
    queue = Queue(client)
    # Asked first without the lock, which a long job of its own may hold
    if running := _running(queue, spec, retry_failed):
        return get_batch(client, running)
    with exclusive(spec.root, _PATIENCE_SECONDS):
        if running := _running(queue, spec, retry_failed):
            return get_batch(client, running)
        found = load_manifest(spec.root)
        manifest = _taken_up(found, spec, retry_failed, queue.now()) if found is not None else None
        if manifest is None:
            identity = batch_id or (found.batch_id if found is not None else f"batch_{secrets.token_hex(12)}")
            manifest = Manifest(batch_id=identity, created_at=queue.now(), spec=spec)
            manifest.enter("validating")
            drop_unlisted(spec.root, [])
        sweep(spec.root)
        unmark_cancelled(spec.root)
        known = found.generation if found is not None else 0
        manifest.generation = max(known, queue.batch_fields(manifest.batch_id).generation)
        queue.forget(manifest.batch_id)
        register(queue, manifest)
    return get_batch(client, manifest.batch_id)


def get_batch(client: redis.Redis, batch_id: str, retry_seconds: float | None = None) -> BatchRecord:
    """Try for `retry_seconds` (default: the setting) while Redis cannot answer, then raise
    `QueueUnavailable`.

    Raise KeyError if there is no such batch.
    """
    [record] = _read_records(client, [batch_id], retry_seconds)
    if record is None:
        raise KeyError(batch_id)
    return record


def list_batches(queue: Queue, tenant: str, after: str | None, limit: int) -> BatchPage:
    """Batches that came through the API, newest first, from behind the id `after`; that batch need
    not be there any more.
    """
    found: list[BatchRecord] = []
    while len(found) <= limit:
        listed = queue.listed_batches(tenant, after, limit + 1 - len(found))
        if not listed:
            break
        found += filter(None, _read_records(queue.redis, listed))
        after = listed[-1]
    return BatchPage(found[:limit], len(found) > limit)


def _read_records(
    client: redis.Redis, batches: list[str], retry_seconds: float | None = None
) -> list[BatchRecord | None]:
    """None for a batch without a record."""
    patience = QueueSettings.from_environment().redis_retry_seconds if retry_seconds is None else retry_seconds
    rows = persistently(lambda: _read(client, batches), patience)
    return [_record(batch, *row) for batch, row in zip(batches, rows, strict=True)]


def _record(batch_id: str, fields: BatchFields, held: int, waiting: int) -> BatchRecord | None:
    if not fields.spec or not fields.exists:
        return None
    spec = msgspec.json.decode(fields.spec, type=BatchSpec)
    fields = _as_on_disk(batch_id, fields)
    readable = fields.output or (fields.logged_lines > 0 and fields.state not in END_STATES)
    return BatchRecord(
        id=batch_id,
        state=fields.state,  # type: ignore[arg-type]
        outcome=fields.outcome,
        spec=spec,
        total=fields.total,
        completed=fields.completed,
        failed=fields.failed,
        stored_completed=fields.stored_completed,
        stored_failed=fields.stored_failed,
        models=fields.line_models,
        waiting=waiting,
        running=max(0, held - waiting),
        errors=_problems(spec.root, fields),
        usage=Usage(fields.prompt_tokens, fields.completion_tokens, fields.cached_tokens),
        timestamps=fields.timestamps,
        output=fields.output or None,
        error_output=fields.error_output or None,
        output_file_id=spec.output_file_id if readable else None,
        error_file_id=spec.error_file_id if fields.error_output else None,
        problem=fields.problem or None,
    )


def _as_on_disk(batch_id: str, fields: BatchFields) -> BatchFields:
    """Return the record of a batch that has not ended with what a Redis that went back has lost of
    its progress, or with its end.
    """
    if fields.state in END_STATES:
        return fields
    manifest = None
    with contextlib.suppress(StoreError):
        manifest = load_manifest(fields.root)
    if manifest is None or (manifest.batch_id, manifest.owner) != (batch_id, fields.owner):
        return fields
    if manifest.state == "cancelled" or (manifest.state in END_STATES and fields.state != "cancelling"):
        times = {**fields.timestamps, **manifest.timestamps}
        end = {**end_fields(manifest), "state": manifest.state, "problem": ""}
        return msgspec.structs.replace(fields, timestamps=times, **end)
    fields = msgspec.structs.replace(fields, timestamps={**manifest.timestamps, **fields.timestamps})
    stored = manifest.completed + manifest.failed
    lost = stored - fields.stored_completed - fields.stored_failed
    if lost <= 0:
        return fields
    changes: dict[str, Any] = progress_fields(manifest)
    if manifest.plan_sha256 is not None:
        changes["total"] = manifest.total
    if fields.completed < manifest.completed or fields.failed < manifest.failed:
        changes |= {"completed": manifest.completed, "failed": manifest.failed}
    return msgspec.structs.replace(fields, **changes)


def _problems(root: str, fields: BatchFields) -> list[LineProblem]:
    """What is wrong with a failed batch's file, or why a batch was given up.

    The record does not hold the first: there may be a thousand entries, and many such batches.
    """
    if fields.lost:
        return [_LOST]
    if fields.state != "failed":
        return []
    try:
        manifest = load_manifest(root)
    except StoreError as error:
        logger.error("failed to read what is wrong with the lines of a batch: %s", error)
        manifest = None
    return manifest.problems if manifest is not None else [_UNREADABLE]


def _read(client: redis.Redis, batches: list[str]) -> list[tuple[BatchFields, int, int]]:
    """Of each batch the record, its lines in Redis, and those of them that wait."""
    with client.pipeline(transaction=False) as pipeline:
        for batch in batches:
            pipeline.hgetall(keys.batch(batch))
            pipeline.hlen(keys.bodies(batch))
        answers = pipeline.execute()
        records = [BatchFields.read_hash(raw) for raw in answers[::2]]
        lists = [[(batch, model) for model in one.line_models] for batch, one in zip(batches, records, strict=True)]
        for batch, model in itertools.chain(*lists):
            pipeline.llen(keys.ready(batch, model))
        lengths = iter(pipeline.execute())
        waiting = [sum(next(lengths) for _ in names) for names in lists]
        return list(zip(records, answers[1::2], waiting, strict=True))


def cancel_batch(client: redis.Redis, batch_id: str) -> BatchRecord:
    """Ask a batch to end; finished lines stay, the rest get error lines.

    Changes nothing in a batch that is cancelled already, or ended. One whose folder is gone has
    ended when this returns.

    Raise KeyError if there is no such batch, and `StoreError`.
    """
    queue = Queue(client)
    record = get_batch(client, batch_id)
    if record.state not in CANCELLABLE:
        return record
    if (reason := why_lost(queue, batch_id, queue.batch_fields(batch_id))) is not None:
        queue.transition(batch_id, CANCELLABLE, "cancelling", {"timestamps": {"cancelling": time.time()}})
        end_lost(queue, batch_id, queue.batch_fields(batch_id), reason)
        return get_batch(client, batch_id)
    mark_cancelled(record.spec.root)
    while (record := get_batch(client, batch_id)).state in CANCELLABLE:
        if begin_cancel(queue, batch_id, queue.batch_fields(batch_id).generation):
            return get_batch(client, batch_id)
    if record.state not in ("cancelling", "cancelled"):
        unmark_cancelled(record.spec.root)
    return record


def _with_absolute_locations(spec: BatchSpec) -> BatchSpec:
    names = [name for name in ("input", "root", "output", "error_output") if getattr(spec, name) is not None]
    return msgspec.structs.replace(spec, **{name: absolute(getattr(spec, name)) for name in names})


def _check_locations(spec: BatchSpec) -> None:
    """What can be known to be wrong before anything runs. Raises `BatchRefused`."""
    if local_path(spec.root) is None:
        raise BatchRefused(f"the batch's folder {spec.root} is remote: it must be on a file system that has locks")
    try:
        if size_of(spec.input) is None:
            raise BatchRefused(f"there is no file {spec.input}")
        open_input(spec.input).close()
        make_folder(spec.root)
        for location in filter(None, (spec.output, spec.error_output)):
            _check_output(location, spec.input)
    except StoreError as error:
        raise BatchRefused(str(error)) from error


def _check_output(location: str, source: str) -> None:
    path = local_path(location)
    if location.lower().endswith(_COMPRESSED):
        raise BatchRefused(f"the output {location} cannot be compressed: name a .jsonl or .parquet file")
    if path is None:
        return
    if path.is_dir():
        raise BatchRefused(f"the output {location} is a folder")
    if path.resolve() == (local_path(source) or Path()).resolve():
        raise BatchRefused(f"the output {location} is the input itself")
    make_folder(str(path.parent))
    probe = path.with_name(f".{path.name}.probe")
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BatchRefused(f"cannot write {location}: {error.strerror}") from error


def _running(queue: Queue, spec: BatchSpec, retry_failed: bool) -> str | None:
    """The id of the batch in the root while the queue works on it; a record that a killed start was
    about to remove does not count.

    Raises `BatchRefused` if that is not what is asked for.
    """
    found = load_manifest(spec.root)
    if found is None or queue.batch_fields(found.batch_id).state not in JOBS:
        return None
    _check_same(found, spec)
    if retry_failed:
        raise BatchRefused(
            f"{found.batch_id} is at work on {spec.root}: failed lines can be run again when it has ended"
        )
    return found.batch_id


def _check_same(found: Manifest, spec: BatchSpec) -> None:
    """Raise `InputChanged` if results in the folder would not fit what is asked now."""
    size = size_of(spec.input)
    if found.input_sha256 is not None and (size != found.input_bytes or sha256_of(spec.input) != found.input_sha256):
        raise InputChanged(
            f"{spec.input} has changed since {spec.root} was begun; remove that folder, or name another output"
        )
    for name in ("default_model", "endpoint", "seed"):
        before, now = getattr(found.spec, name), getattr(spec, name)
        if before != now:
            raise InputChanged(
                f"{spec.root} was begun with {name} {before}, not {now}; remove that folder, or name another output"
            )


def _taken_up(found: Manifest, spec: BatchSpec, retry_failed: bool, now: float) -> Manifest | None:
    """The manifest to go on with; None if nothing in the folder is worth keeping."""
    if not found.parts:
        return None
    _check_same(found, spec)
    manifest = msgspec.structs.replace(found, spec=spec, outcome="completed", problems=[], created_at=now)
    repair(manifest)
    _drop_failures(manifest, 400 if retry_failed else 500)
    plan = join(spec.root, PLAN_NAME)
    served = spec.models is None or set(found.models) <= set(spec.models)
    planned = found.plan_sha256 is not None and size_of(plan) is not None and sha256_of(plan) == found.plan_sha256
    if not served or not planned or (manifest.source != spec.input and not is_whole(manifest)):
        manifest.plan_sha256 = None
    manifest.timestamps = {}
    manifest.enter("validating")
    return manifest


def _drop_failures(manifest: Manifest, status: int) -> None:
    """Take results of `status` and above out of the parts, so that their lines run again."""
    root = manifest.spec.root
    failed = Bitmap()
    for record in merge_parts(root, manifest.parts):
        if record.result.status >= status:
            failed.add(record.line)
    if not failed.bits:
        return
    kept = (record for record in merge_parts(root, manifest.parts) if record.line not in failed)
    manifest.next_part += 1
    manifest.parts = [write_records(root, f"{manifest.next_part:06d}-kept", kept)]
