"""Forget a batch: for operators, of one that has ended or never will."""

import contextlib
import shutil
from pathlib import Path

import msgspec

from jobs.batch.client import BatchRefused
from jobs.batch.lost import why_lost
from jobs.batch.manifest import NAME as MANIFEST_NAME
from jobs.batch.manifest import BatchSpec, ManifestDamaged, load_manifest
from jobs.batch.result_files import drop_partial_output
from jobs.protocol.ids import BATCH, is_id
from jobs.protocol.states import END_STATES, JOBS
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileStore
from jobs.store.storage import delete, exclusive, join

_PATIENCE_SECONDS = 5.0


def forget_batch(queue: Queue, files: FileStore, batch: str) -> str:
    """Remove what Redis has of a batch, and its folder in the file store; return what is left.

    Raise KeyError if there is no such batch, `BatchRefused` for one that runs well, `Busy` while a
    job works on it, and `StoreError` while the file store is away.
    """
    files.check()
    fields = queue.batch_fields(batch)
    folder = files.batch_root(batch) if is_id(BATCH, batch) else None
    if folder is not None and not folder.is_dir():
        folder = None
    if not fields.state and folder is None:
        raise KeyError(batch)
    held = fields.root if folder is None else str(folder)
    with exclusive(held, _PATIENCE_SECONDS) if held and Path(held).is_dir() else contextlib.nullcontext():
        fields = queue.batch_fields(batch)
        _check_stopped(queue, batch, fields, folder)
        if folder is not None:
            delete(join(str(folder), MANIFEST_NAME))  # without it, nothing runs what a kill leaves
        queue.unlist_batch(fields.tenant, batch)
        queue.forget(batch)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    spec = msgspec.json.decode(fields.spec, type=BatchSpec) if fields.spec else None
    if spec is None or spec.of_api:
        if spec is not None:
            drop_partial_output(queue, spec)
        return "its result files stay until they expire"
    return f"its folder {spec.root} stays: remove it, or run the same command again to go on from it"


def _check_stopped(queue: Queue, batch: str, fields: BatchFields, folder: Path | None) -> None:
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
