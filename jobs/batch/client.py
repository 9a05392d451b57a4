"""The client's view of batches: create, read, list, cancel.

Synchronous; `redis` is a client from `jobs.queue.connection.connect`. `jobs.batch.submit` creates
batches that come through the API.

A batch is defined by its root folder (`jobs.batch.manifest`); its record in Redis can be rebuilt
from it.
"""

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import redis

from jobs.batch.appending import requests_of
from jobs.batch.batch_folder import (
    BatchRefused,
    InputChanged,
    check_locations,
    running_in,
    taken_up,
    with_absolute_locations,
)
from jobs.batch.ending import begin_cancel
from jobs.batch.lost import end_lost, why_lost
from jobs.batch.manifest import (
    BatchSpec,
    LineProblem,
    Manifest,
    decode_spec,
    end_fields,
    load_manifest,
    mark_cancelled,
    progress_fields,
    unmark_cancelled,
)
from jobs.batch.parts import drop_all
from jobs.batch.register import register
from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.period import ALWAYS, Period
from jobs.protocol.results import Usage
from jobs.protocol.states import CANCELLABLE, END_STATES, KEPT_IN_SIGHT, MAY_EXPIRE, EndState, State
from jobs.protocol.unknown_members import UnknownMember
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields, Risk
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import persistently
from jobs.queue.settings import QueueSettings
from jobs.store.storage import Busy, StoreError, exclusive, sweep

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

MOST_LISTED = 10_000
"""Batches to read for one page of a listing; more are read if none matched."""

_GROUP = 500  # batches per step
_PATIENCE_SECONDS = 5.0
_UNREADABLE = LineProblem("errors_unavailable", "The errors of the input file cannot be read at the moment.")
_LOST = LineProblem("batch_lost", "The files of this batch are gone from the server, so it cannot be finished.")

logger = logging.getLogger(__name__)


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch at one moment.

    Counts are lines; timestamps are unix seconds by state (`created`, `in_progress`, …, `expires`).
    """

    id: str
    state: State
    outcome: EndState  # the end state, as far as known
    spec: BatchSpec
    open: bool  # lines may be appended
    shows_lines: bool  # as in `BatchStatus`
    total: int
    completed: int
    failed: int
    # This and the next: those on disk, which a loss of Redis does not affect.
    stored_completed: int
    stored_failed: int
    models: list[str]  # named by the lines; empty until the file is validated
    waiting: int  # lines in Redis that wait for a worker
    running: int
    errors: list[LineProblem]
    unknown_members: list[UnknownMember]  # of the lines' bodies; they have no effect
    usage: Usage  # of the lines on disk; final in an end state
    timestamps: dict[str, float]
    output: str | None
    error_output: str | None
    output_file_id: str | None  # set once the file can be read: from the first logged success
    error_file_id: str | None
    problem: str | None  # why the batch makes no progress (full disk, missing file); it is retried
    risk: Risk | None  # of missing the end of its window; only while in progress

    @property
    def ended(self) -> bool:
        """Return whether the state is final."""
        return self.state in END_STATES

    @property
    def shown_state(self) -> State:
        """Return the state that clients see, which never goes back.

        A batch rebuilt in an empty Redis is validated again; clients see its later state. A batch
        whose window has ended is shown in progress until its files are written: OpenAI's batches go
        from there to `expired`.
        """
        if self.state not in KEPT_IN_SIGHT:
            return self.state
        states = MAY_EXPIRE if self.outcome == "expired" else KEPT_IN_SIGHT
        return next(state for state in reversed(states) if state == self.state or state in self.timestamps)


class BatchPage(NamedTuple):
    """A page of a listing; `last` is the id to continue after, or None at the end."""

    items: list[BatchRecord]
    last: str | None

    @property
    def has_more(self) -> bool:
        """Return whether the listing continues."""
        return self.last is not None


def create_batch(
    client: redis.Redis,
    spec: BatchSpec,
    batch_id: str | None = None,
    retry_failed: bool = False,
    defaults: Mapping[str, DefaultParameters] | None = None,
) -> BatchRecord:
    """Create a batch, or resume the one in `spec.root`.

    Finished lines stay finished, except answers of status 500 and above; with `retry_failed` every
    failed line runs again. A running batch is returned unchanged. `defaults` are those of models
    that the caller will serve; a resumed batch keeps its own. The manifest is on disk before the
    record is in Redis. Raise `BatchRefused` (`InputChanged` if the root belongs to another
    input), `Busy` and `StoreError`.
    """
    spec = with_absolute_locations(spec)
    check_locations(spec)
    queue = Queue(client)
    # Check first without the lock, which a job of the batch may hold for long.
    if running := _running(queue, spec, retry_failed):
        return running
    with exclusive(spec.root, _PATIENCE_SECONDS):
        if running := _running(queue, spec, retry_failed):
            return running
        found = load_manifest(spec.root)
        manifest = taken_up(found, spec, retry_failed, queue.now()) if found is not None else None
        if manifest is None:
            identity = batch_id or (found.batch_id if found is not None else f"batch_{secrets.token_hex(12)}")
            manifest = Manifest(batch_id=identity, created_at=queue.now(), spec=spec, defaults=dict(defaults or {}))
            manifest.enter("validating")
            drop_all(spec.root)
        sweep(spec.root)
        unmark_cancelled(spec.root)
        known = found.generation if found is not None else 0
        manifest.generation = max(known, queue.batch_fields(manifest.batch_id).generation)
        queue.forget(manifest.batch_id)
        # Not read back: a Redis that comes back empty has no record.
        fields = register(queue, manifest)
    return record_of(manifest.batch_id, spec, _as_on_disk(manifest.batch_id, fields))


def _running(queue: Queue, spec: BatchSpec, retry_failed: bool) -> BatchRecord | None:
    """Return the batch in the root while the queue works on it.

    Also None if Redis came back empty meanwhile. Raise `BatchRefused` if the running batch differs
    from the requested one.
    """
    running = running_in(queue, spec, retry_failed)
    with contextlib.suppress(KeyError):
        return get_batch(queue.redis, running) if running else None
    return None


def get_batch(client: redis.Redis, batch_id: str, retry_seconds: float | None = None) -> BatchRecord:
    """Return a batch.

    Retries for `retry_seconds` (default: the setting) while Redis cannot answer, then raises
    `QueueUnavailable`. Raise KeyError if there is no such batch.
    """
    [record] = _read_records(client, [batch_id], retry_seconds)
    if record is None:
        raise KeyError(batch_id)
    return record


def list_batches(
    queue: Queue,
    tenant: str,
    after: str | None,
    limit: int,
    states: Collection[str] = (),
    created: Period = ALWAYS,
) -> BatchPage:
    """Return batches that came through the API, newest first, after the id `after`.

    That batch need not exist. Only batches shown in one of `states` (any, if empty) and created in
    the period are listed. A page that has a batch may be short once `MOST_LISTED` were read; a page
    is never empty before the end, since clients take it for the end.
    """
    found: list[BatchRecord] = []
    looked_at = 0
    while len(found) <= limit:
        if found and looked_at >= MOST_LISTED:
            return BatchPage(found, after)
        listed = queue.listed_batches(tenant, after, _GROUP if states else limit + 1 - len(found), created)
        if not listed:
            return BatchPage(found, None)
        found += _records_in(queue, listed, states)
        looked_at, after = looked_at + len(listed), listed[-1]
    return BatchPage(found[:limit], found[limit - 1].id)


def _records_in(queue: Queue, batches: list[str], states: Collection[str]) -> list[BatchRecord]:
    """Return the records of those batches that are shown in one of `states`, or all if it is
    empty.
    """
    if not states:
        return [record for record in _read_records(queue.redis, batches) if record is not None]
    # An end state is shown unchanged, so most batches need not be read.
    known = queue.states_of(batches).items()
    batches = [batch for batch, state in known if state not in END_STATES or state in states]
    return [record for record in _read_records(queue.redis, batches) if record and record.shown_state in states]


def _read_records(
    client: redis.Redis, batches: list[str], retry_seconds: float | None = None
) -> list[BatchRecord | None]:
    """Return the records; None for a batch without one."""
    patience = QueueSettings.from_environment().redis_retry_seconds if retry_seconds is None else retry_seconds
    rows = persistently(lambda: _read(client, batches), patience)
    return [_record(batch, *row) for batch, row in zip(batches, rows, strict=True)]


def _record(batch_id: str, fields: BatchFields, held: int, waiting: int) -> BatchRecord | None:
    if not fields.spec or not fields.exists:
        return None
    spec = decode_spec(fields.spec)
    return record_of(batch_id, spec, _as_on_disk(batch_id, fields), held, waiting)


def record_of(batch_id: str, spec: BatchSpec, fields: BatchFields, held: int = 0, waiting: int = 0) -> BatchRecord:
    """Return the record of a batch with `held` lines in Redis, `waiting` of which wait."""
    readable = fields.output or (fields.logged_lines > 0 and fields.state not in END_STATES)
    return BatchRecord(
        id=batch_id,
        state=fields.state,  # type: ignore[arg-type]
        outcome=fields.outcome,
        spec=spec,
        open=fields.open,
        shows_lines=fields.shows_lines,
        total=fields.total,
        completed=fields.completed,
        failed=fields.failed,
        stored_completed=fields.stored_completed,
        stored_failed=fields.stored_failed,
        models=fields.line_models,
        waiting=waiting,
        running=max(0, held - waiting) if fields.shows_lines else 0,
        errors=_problems(spec.root, fields),
        unknown_members=fields.unknown_members,
        usage=Usage(
            fields.prompt_tokens,
            fields.completion_tokens,
            fields.cached_tokens,
            fields.reasoning_tokens,
            fields.device_microseconds,
        ),
        timestamps=fields.timestamps,
        output=fields.output or None,
        error_output=fields.error_output or None,
        output_file_id=spec.output_file_id if readable else None,
        error_file_id=spec.error_file_id if fields.error_output else None,
        problem=fields.problem or None,
        risk=fields.shown_risk or None,
    )


def _as_on_disk(batch_id: str, fields: BatchFields) -> BatchFields:
    """Return the record of a running batch, corrected from disk after a loss of Redis.

    The disk may have more progress, or the batch's end.
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
    if manifest.spec.streams_input:
        fields = _as_appended(manifest, fields)
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


def _as_appended(manifest: Manifest, fields: BatchFields) -> BatchFields:
    """Return the record with the lines appended since the last slice, and whether it was closed."""
    with contextlib.suppress(StoreError):
        found = requests_of(manifest.spec).committed()
        times = {"appended": found.appended_at} if found.appended_at else {}
        return fields.changed({"open": not found.closed, "total": found.lines, "timestamps": times})
    return fields


def _problems(root: str, fields: BatchFields) -> list[LineProblem]:
    """Return the problems of a failed batch's file, or why a batch was aborted.

    The record does not have the former: a batch may have a thousand, and there are many batches.
    """
    if fields.lost:
        return [_LOST]
    if fields.state != "failed":
        return []
    try:
        manifest = load_manifest(root)
    except StoreError as error:
        logger.error("failed to read the line errors of a batch: %s", error)
        manifest = None
    return manifest.problems if manifest is not None else [_UNREADABLE]


def _read(client: redis.Redis, batches: list[str]) -> list[tuple[BatchFields, int, int]]:
    """Return for each batch its record, its lines in Redis, and how many of them wait."""
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
    """Cancel a batch; finished lines stay, the others get error lines.

    Changes nothing in a batch that is cancelled or ended. A batch whose folder is gone ends at
    once.

    Raise KeyError if there is no such batch, and `StoreError`.
    """
    queue = Queue(client)
    record = get_batch(client, batch_id)
    if record.state not in CANCELLABLE:
        return record
    fields = queue.batch_fields(batch_id)
    if not fields.spec:  # Redis came back empty
        raise KeyError(batch_id)
    if (reason := why_lost(queue, batch_id, fields)) is not None:
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
