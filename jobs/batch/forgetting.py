"""Delete a batch: for its tenant an ended one, for operators also one that can never end.

The deletion is first noted on disk (`jobs.batch.deleted`). From then on it is completed, if
necessary by the upkeep.
"""

import contextlib
import logging
import math
import time
from pathlib import PurePath

from jobs.batch.client import BatchRecord, BatchRefused, get_batch
from jobs.batch.deleted import note_deleted, note_of
from jobs.batch.lost import why_lost
from jobs.batch.manifest import NAME as MANIFEST_NAME
from jobs.batch.manifest import BatchSpec, ManifestDamaged, decode_spec, load_manifest
from jobs.batch.result_files import drop_partial_output
from jobs.protocol.ids import BATCH, is_id, time_of
from jobs.protocol.states import END_STATES, JOBS
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileStore
from jobs.store.leases import hold
from jobs.store.marker import BATCHES_FOLDER, DELETED_FOLDER
from jobs.store.storage import (
    Busy,
    StoreError,
    delete,
    exists,
    join,
    list_names,
    remove_tree,
    stamp_of,
)

_PATIENCE_SECONDS = 5.0
_GROUP = 500  # states read per step

logger = logging.getLogger(__name__)


def delete_batch(queue: Queue, files: FileStore, batch: str) -> BatchRecord:
    """Remove an ended batch that came through the API, and return it; its result files stay.

    Changes nothing in a batch that has not ended. Raise KeyError if there is no such batch, and
    `StoreError`.
    """
    files.check()
    record, folder = get_batch(queue.redis, batch), files.batch_root(batch)
    if not record.ended:
        return record
    try:
        with _held(queue, str(folder), _PATIENCE_SECONDS):
            record = get_batch(queue.redis, batch)
            if record.ended:
                _remove(queue, batch, queue.batch_fields(batch), folder)
    except Busy as error:
        raise StoreError(str(error)) from error
    return record


def forget_batch(queue: Queue, files: FileStore, batch: str) -> str:
    """Remove a batch's keys in Redis, and its folder in the file store; return what remains.

    Raise KeyError if there is no such batch, `BatchRefused` for one that runs well, `Busy` while a
    job works on it, and `StoreError` while the file store is unavailable.
    """
    files.check()
    fields = queue.batch_fields(batch)
    folder = files.batch_root(batch) if is_id(BATCH, batch) else None
    if folder is not None and not exists(str(folder)):
        folder = None
    if not fields.state and folder is None:
        raise KeyError(batch)
    with _held(queue, fields.root if folder is None else str(folder), _PATIENCE_SECONDS):
        fields = queue.batch_fields(batch)
        _check_stopped(queue, batch, fields, folder)
        _remove(queue, batch, fields, folder)
    spec = _spec(fields)
    if spec is None or spec.of_api:
        return "its result files stay until they expire"
    return f"its folder {spec.root} stays: remove it, or run the same command again to resume from it"


def finish_deletions(queue: Queue, files: FileStore, now: float, seconds: float = math.inf, after: str = "") -> str:
    """Remove the remains of deleted batches after a kill or a loss of Redis, and old notes.

    A note is removed when it is older than any data that may reappear. Takes about `seconds`, and
    returns the `after` of the next call, "" to start over. The store must have been checked. Raise
    `StoreError`.
    """
    deadline = time.monotonic() + seconds
    noted = sorted(name for name in list_names(str(files.root / DELETED_FOLDER)) if name > after)
    folders = set(list_names(str(files.root / BATCHES_FOLDER))) if noted else set()
    for start in range(0, len(noted), _GROUP):
        for batch, state in queue.states_of(noted[start : start + _GROUP]).items():
            if batch in folders or state:
                _finish(queue, files.batch_root(batch))
            else:
                _drop_old_note(files.batch_root(batch), now - queue.settings.ended_batch_seconds)
            if time.monotonic() >= deadline:
                return batch
    return ""


def _finish(queue: Queue, folder: PurePath) -> None:
    """Remove the remains of one batch; the next sweep retries failures."""
    try:
        with _held(queue, str(folder), 0):
            _remove(queue, folder.name, queue.batch_fields(folder.name), folder)
    except (Busy, StoreError) as error:
        logger.warning("failed to remove the rest of the deleted batch %s; retrying: %s", folder.name, error)


def _drop_old_note(folder: PurePath, before: float) -> None:
    note = str(note_of(str(folder)))
    # The note's age is read only if the batch is as old.
    if (time_of(folder.name) or 0.0) < before and (stamp := stamp_of(note)) is not None and stamp[1] < before * 1e9:
        delete(note)


def _held(queue: Queue, root: str, patience: float) -> contextlib.AbstractContextManager[None]:
    return hold(queue, root, patience) if root and exists(root) else contextlib.nullcontext()


def _remove(queue: Queue, batch: str, fields: BatchFields, folder: PurePath | None) -> None:
    """Remove all of a batch except its finished result files; may be repeated after a kill.

    `folder` is None for a batch without one in the file store.
    """
    if folder is not None:
        note_deleted(str(folder))
    spec = _spec(fields) or _spec_on_disk(folder)
    if spec is not None and spec.of_api:
        drop_partial_output(queue, spec)  # while Redis or the manifest names it
    if folder is not None:
        delete(join(str(folder), MANIFEST_NAME))  # without it, a batch whose removal was killed never runs
    queue.unlist_batch(fields.tenant, batch)
    queue.forget(batch)
    if folder is not None:
        remove_tree(str(folder))


def _spec(fields: BatchFields) -> BatchSpec | None:
    return decode_spec(fields.spec) if fields.spec else None


def _spec_on_disk(folder: PurePath | None) -> BatchSpec | None:
    with contextlib.suppress(ManifestDamaged):
        manifest = None if folder is None else load_manifest(str(folder))
        return None if manifest is None else manifest.spec
    return None


def _check_stopped(queue: Queue, batch: str, fields: BatchFields, folder: PurePath | None) -> None:
    """Raise `BatchRefused` for a batch that runs well, or will once Redis has its record again."""
    if fields.spec and fields.state in JOBS and _runs_well(queue, batch, fields):
        raise BatchRefused(f"{batch} is {fields.state} and runs well: cancel it first")
    if fields.exists or folder is None:
        return
    with contextlib.suppress(ManifestDamaged):
        manifest = load_manifest(str(folder))
        if manifest is not None and manifest.state not in END_STATES:
            raise BatchRefused(
                f"{batch} is {manifest.state} and has no record in Redis: wait until `pipeline jobs` has made it"
                " again, and cancel the batch first"
            )


def _runs_well(queue: Queue, batch: str, fields: BatchFields) -> bool:
    if fields.state == "cancelling" or fields.problem:
        return False
    return why_lost(queue, batch, fields) is None
