"""Creation of batches that come through the API: from a file of the store, in a folder there."""

import contextlib

import msgspec

from jobs.batch.appending import requests_of
from jobs.batch.client import BatchRecord, BatchSpec, LineProblem, get_batch, record_of
from jobs.batch.deleted import refuse_deleted
from jobs.batch.manifest import NAME as MANIFEST_NAME
from jobs.batch.manifest import Manifest, Superseded, give_up, load_manifest, take_back
from jobs.batch.open_requests import SOURCE_NAME
from jobs.batch.rebuild import rebuild
from jobs.batch.register import register
from jobs.batch.result_files import result_locations
from jobs.errors import JobsError
from jobs.protocol import fields
from jobs.protocol.ids import BATCH, FILE, micros_of, new_id, time_of
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue, QueueFull, QueueUnavailable
from jobs.store.file_store import FileStore
from jobs.store.leases import hold
from jobs.store.storage import (
    Busy,
    StoreError,
    begin_folder,
    delete,
    is_local,
    join,
    link,
    list_names,
    named,
    path_of,
    remove_tree,
    sync_folder,
)

_PATIENCE_SECONDS = 5.0
_MAKING_SECONDS = 60  # within this time an admitted batch gets its record


class BatchSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request for a batch, with its limits; None means no limit."""

    input_file_id: str
    streams_input: bool = False  # an open batch, whose input file gets an id now and is written at its end
    endpoint: str
    completion_window: str
    seconds: float  # of the completion window
    metadata: dict[str, str] | None = None
    priority: int = 0
    tenant: str = ""
    # None: as long as the file store keeps a batch's files.
    output_expires_seconds: int | None = None
    max_lines: int | None = None
    queued_tokens: int | None = None  # in all open batches of the tenant
    open_batches: int | None = None  # of the tenant
    strict_parameters: bool = False  # a line with an unknown member of its body is invalid
    key_id: str = ""  # of the requesting API key, "" for none


class TooManyBatches(JobsError):
    """The tenant has reached its limit of open batches."""

    status = 429
    retry = True


class NotBegun(QueueUnavailable):
    """The queue became unavailable before anything of a batch was stored."""


def submit_batch(queue: Queue, files: FileStore, new: BatchSubmission, batch_id: str | None = None) -> BatchRecord:
    """Create a batch, of an unused id, durably.

    A batch with an unusable input file is created, too, and fails in validation.

    Raise `TooManyBatches`, `StoreError` (for a full disk `StoreFull`), `QueueFull` and `NotBegun`:
    then none was created. After another `QueueUnavailable`, also if a bucket stops answering, the
    batch may exist: a repeated request may create a second one.
    """
    manifest = _begin(queue, files, new, batch_id)
    try:
        return _make(queue, files, new, manifest)
    except (StoreError, QueueFull):
        if not manifest.revision:  # `_take_back` has handled a saved one
            remove_tree(manifest.spec.root)
            _unlist(queue, new.tenant, manifest.batch_id)
        raise


def _begin(queue: Queue, files: FileStore, new: BatchSubmission, batch_id: str | None) -> Manifest:
    """Count a batch among the tenant's open ones.

    Raise `TooManyBatches`, `StoreError`, `QueueFull` and `NotBegun`.
    """
    try:
        files.check()
        batch = batch_id or new_id(BATCH, queue.now())
        if not _open(queue, batch, new):
            raise TooManyBatches(new.tenant)
    except QueueFull:
        raise
    except QueueUnavailable as error:
        raise NotBegun(str(error)) from error
    created = micros_of(BATCH, batch) / 1e6  # its time in listings, too
    spec = BatchSpec(input="", root=str(files.batch_root(batch)))
    return Manifest(batch_id=batch, created_at=created, spec=spec, defaults={})


def check_open(queue: Queue, new: BatchSubmission) -> None:
    """Raise `TooManyBatches` if the tenant has reached its limit of open batches."""
    if new.open_batches is not None:
        batches = set(queue.open_batches(new.tenant)).difference(_gone(queue, new.tenant))
        if len(batches) >= new.open_batches:
            raise TooManyBatches(new.tenant)


def submitted_batch(queue: Queue, files: FileStore, tenant: str, batch: str) -> BatchRecord | None:
    """Return the batch of a finished submission; remove its remains and return None if there is
    none.

    Raise `ApiError` 404 for a deleted one, `StoreError` and `QueueUnavailable`.
    """
    files.check()
    root = str(files.batch_root(batch))
    manifest = load_manifest(root)
    # Checked after that, since a deletion is noted before the manifest is removed.
    refuse_deleted(root)
    if manifest is None and not is_local(root) and not give_up(root):
        manifest = load_manifest(root)
    if manifest is None:
        if is_local(root):  # a bucket keeps the marker of an abandoned batch for a day
            remove_tree(root)
        _unlist(queue, tenant, batch)
        return None
    try:
        if not queue.batch_fields(batch).exists:
            rebuild(queue, root)
    except (Busy, Superseded) as error:
        raise StoreError(str(error)) from error
    try:
        return get_batch(queue.redis, batch)
    except KeyError:
        raise QueueUnavailable(f"the batch {batch} is not in Redis yet") from None


def _unlist(queue: Queue, tenant: str, batch: str) -> None:
    queue.forget(batch)
    queue.unlist_batch(tenant, batch)
    queue.dismiss(tenant, batch)


def _make(queue: Queue, files: FileStore, new: BatchSubmission, manifest: Manifest) -> BatchRecord:
    """Return the record as created: the next job may have changed it already."""
    root = manifest.spec.root
    begin_folder(root)
    with named("cannot make the folder", root):
        sync_folder(path_of(root).parent)
    manifest.spec = _spec(files, new, root, manifest.created_at)
    if new.streams_input:
        requests_of(manifest.spec).create()
    if not manifest.spec.input:
        message = (
            f"Cannot find file {fields.shown(new.input_file_id)}, or organization {new.tenant or 'default'} does not"
            " have access to it. It must be a file with the purpose 'batch'."
        )
        manifest.problems = [LineProblem("invalid_request", message, None, "file_id")]
    try:
        # After a start of Redis, the ticker looks into every folder.
        with hold(queue, root, _PATIENCE_SECONDS):
            try:
                return record_of(manifest.batch_id, manifest.spec, register(queue, manifest))
            except (StoreError, QueueFull, Superseded) as error:
                may_come = manifest.stored_version is None and not isinstance(error, Superseded)
                if not _take_back(queue, manifest, may_come):  # while no process can resume it
                    raise QueueUnavailable(f"{manifest.batch_id} may have been made: {error}") from error
                raise
    except Busy as error:
        raise StoreError(str(error)) from error
    except Superseded as error:
        raise StoreError(f"{manifest.batch_id} was given up before it was made: ask for it again") from error


def _take_back(queue: Queue, manifest: Manifest, may_come: bool) -> bool:
    """Remove a batch that was begun; return False if it may exist nevertheless.

    Another process that repeats the call may have resumed it. If the manifest `may_come` later, the
    marker of the abandoned batch stays.
    """
    root = manifest.spec.root
    try:
        if not is_local(root) and not take_back(manifest):
            return False
    except StoreError:
        return False
    if may_come and not is_local(root):
        with contextlib.suppress(StoreError):
            for name in set(list_names(root)) - {MANIFEST_NAME}:
                delete(join(root, name))
                remove_tree(join(root, name))
    else:
        remove_tree(root)
    _unlist(queue, manifest.spec.tenant, manifest.batch_id)
    return True


def _open(queue: Queue, batch: str, new: BatchSubmission) -> bool:
    if queue.open_batch(new.tenant, batch, new.open_batches):
        return True
    if gone := _gone(queue, new.tenant):
        queue.dismiss(new.tenant, *gone)
    return bool(gone) and queue.open_batch(new.tenant, batch, new.open_batches)


def _gone(queue: Queue, tenant: str) -> list[str]:
    """Return batches that count as open but were never created or have just ended."""
    made_before = queue.now() - _MAKING_SECONDS
    states = queue.open_states(tenant).items()
    return [
        batch for batch, state in states if state in END_STATES or (not state and (time_of(batch) or 0.0) < made_before)
    ]


def _spec(files: FileStore, new: BatchSubmission, root: str, now: float) -> BatchSpec:
    """Return the settings; `input` is empty if the input file cannot be used. Raise
    `StoreError`.
    """
    source = join(root, SOURCE_NAME) if new.streams_input else _take_input(files, new, root)
    input_file_id, output_file_id, error_file_id = (new_id(FILE, now) for _ in range(3))
    output, error_output = result_locations(files, output_file_id, error_file_id, source)
    return BatchSpec(
        input=source,
        root=root,
        output=output,
        error_output=error_output,
        endpoint=new.endpoint,
        tenant=new.tenant,
        metadata=new.metadata,
        priority=new.priority,
        completion_window_seconds=new.seconds,
        skip_invalid_requests=new.streams_input,
        strict_parameters=new.strict_parameters,
        streams_input=new.streams_input,
        input_file_id=input_file_id if new.streams_input else new.input_file_id,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
        completion_window=new.completion_window,
        output_expires_seconds=new.output_expires_seconds,
        max_lines=new.max_lines,
        queued_tokens=new.queued_tokens,
        key_id=new.key_id,
    )


def _take_input(files: FileStore, new: BatchSubmission, root: str) -> str:
    """Link the input file into the batch's folder, so that it may be deleted meanwhile.

    Return "" if it is not a file for batches.
    """
    try:
        record = files.get(new.tenant, new.input_file_id)
        if record.purpose != "batch":
            return ""
        own = join(root, f"input{record.suffix}")
        link(str(files.content_path(record)), own)
    except (KeyError, StoreError) as error:
        if isinstance(error, StoreError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        return ""
    return own
