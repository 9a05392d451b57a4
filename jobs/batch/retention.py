"""Retention of ended batches: most of a folder is removed at once, the rest after some days."""

import logging
import math
import time

from jobs.batch.appended import remove_appended
from jobs.batch.completion_log import remove_log
from jobs.batch.deleted import is_deleted
from jobs.batch.input_files import SPOOL_NAME
from jobs.batch.line_index import INDEX_NAME
from jobs.batch.manifest import MADE, Manifest, load_manifest, unmark_cancelled
from jobs.batch.manifest import NAME as MANIFEST_NAME
from jobs.batch.open_requests import APPEND_LOCK, DATABASE_NAME, JOURNAL_NAME, NEXT_LOCK
from jobs.batch.parts import drop_all
from jobs.batch.plan import PLAN_NAME
from jobs.batch.stored_lines import NAME as STORED_NAME
from jobs.protocol.ids import BATCH, is_id, time_of
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue
from jobs.store.marker import BATCHES_FOLDER, check_store
from jobs.store.storage import (
    StoreError,
    clear_folder,
    delete,
    is_local,
    join,
    list_names,
    path_of,
    remove_tree,
    size_of,
)

_DONE_WITH = (PLAN_NAME, STORED_NAME, DATABASE_NAME, JOURNAL_NAME, APPEND_LOCK, NEXT_LOCK)
_UNMADE_SECONDS = 24 * 3600  # until a folder without a manifest is abandoned
# How long a missing manifest is looked for after that; older folders are checked only by age.
_UNMADE_CHECKED_SECONDS = 3600

logger = logging.getLogger(__name__)


def tidy(root: str) -> bool:
    """Remove the files that an ended API batch no longer needs.

    Its completion log and the names of its lines stay. Return False if the removal must be retried:
    a bucket may be briefly unavailable.
    """
    try:
        manifest = load_manifest(root)
        if manifest is None or manifest.state not in END_STATES or not manifest.spec.of_api:
            return True
        for name in _DONE_WITH if is_local(root) else (PLAN_NAME,):
            delete(join(manifest.made_root, name))
        if not is_local(root):
            _remove_other_made(root, manifest)
        if manifest.spec.streams_input and not is_local(root):
            remove_appended(root)
        drop_all(root)
        if manifest.state != "cancelled":  # the request to cancel came too late
            unmark_cancelled(root)
        if not manifest.logged_lines:
            _remove_log(root, manifest)
    except StoreError as error:
        logger.warning("failed to clean up batch folder %s: %s", root, error)
        return is_local(root) or not error.retry
    return True


def _remove_other_made(root: str, manifest: Manifest) -> None:
    """Remove files of validations that ended before the manifest could name them."""
    for name in list_names(root):
        if name.startswith(f"{MADE}-") and name != manifest.made:
            clear_folder(join(root, name), PLAN_NAME)


def forget_output(root: str, file_id: str) -> None:
    """Remove the completion log of an ended batch without an output file, and the names of its
    lines.

    Raise `StoreError`.
    """
    manifest = load_manifest(root)
    if manifest is not None and manifest.state in END_STATES and manifest.spec.output_file_id == file_id:
        _remove_log(root, manifest)


def _remove_log(root: str, manifest: Manifest) -> None:
    remove_log(root)
    for name in (INDEX_NAME, SPOOL_NAME):
        delete(join(manifest.made_root, name))
    if manifest.spec.input:
        delete(manifest.spec.input)


def remove_ended(queue: Queue, file_store: str, now: float, seconds: float = math.inf) -> int:
    """Remove batches that ended `ended_batch_seconds` ago, and folders that never became a batch.

    Takes about `seconds`, oldest first. Return the number removed. Raise `StoreError`.
    """
    check_store(queue, path_of(file_store))
    folder = join(file_store, BATCHES_FOLDER)
    removed, deadline = 0, time.monotonic() + seconds
    for name in list_names(folder):
        made = time_of(name) if is_id(BATCH, name) else None
        if made is None or time.monotonic() >= deadline:
            continue
        age, root = now - made, join(folder, name)
        unmade = (
            _UNMADE_SECONDS < age < _UNMADE_SECONDS + _UNMADE_CHECKED_SECONDS
            and not size_of(join(root, MANIFEST_NAME))  # an empty manifest marks an abandoned batch
        )
        if unmade or age > queue.settings.ended_batch_seconds:
            removed += _remove_if_due(queue, name, root, made, now)
    return removed


def is_kept(queue: Queue, file_store: str, tenant: str, batch: str) -> bool:
    """Return whether the tenant's batch is in the file store, so that its record can be rebuilt.

    Raise `StoreError`.
    """
    root = join(file_store, BATCHES_FOLDER, batch)
    manifest = load_manifest(root)
    if manifest is None or manifest.spec.tenant != tenant or is_deleted(root):
        return False
    return queue.now() < _kept_until(manifest, queue.settings.ended_batch_seconds)


def _remove_if_due(queue: Queue, batch: str, root: str, made: float, now: float) -> bool:
    try:
        manifest = load_manifest(root)
    except StoreError as error:
        logger.error("failed to read the manifest of batch %s; not removing the batch: %s", batch, error)
        return False
    if now < (
        made + _UNMADE_SECONDS if manifest is None else _kept_until(manifest, queue.settings.ended_batch_seconds)
    ):
        return False
    check_store(queue, path_of(root).parents[1])
    if manifest is not None:
        queue.unlist_batch(manifest.spec.tenant, batch)
        queue.forget(batch)
    remove_tree(root)
    return True


def _kept_until(manifest: Manifest, seconds: float) -> float:
    return manifest.timestamps[manifest.state] + seconds if manifest.state in END_STATES else float("inf")
