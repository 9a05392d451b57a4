"""Rebuild the record of a batch in an empty Redis from its manifest.

The next job continues with the batch's parts and plan.
"""

import logging
import math
import time

from jobs.batch.deleted import is_deleted
from jobs.batch.manifest import Manifest, Superseded, is_marked_cancelled, load_manifest, save_manifest
from jobs.batch.register import register
from jobs.batch.webhook_notes import note_webhook
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue
from jobs.store.leases import hold
from jobs.store.marker import BATCHES_FOLDER
from jobs.store.storage import Busy, StoreError, join, list_names

logger = logging.getLogger(__name__)


def unknown_folders(queue: Queue, file_store: str) -> list[str]:
    """Return folders under `file_store` that may hold a batch without a record.

    The newest of the API come first. Raise `StoreError`.
    """
    known = set(queue.batches())  # the folder of an API batch has its id
    return [name for name in reversed(list_names(join(file_store, BATCHES_FOLDER))) if name not in known]


def rebuild_all(
    queue: Queue, file_store: str, names: list[str] | None = None, seconds: float = math.inf
) -> tuple[int, list[str]]:
    """Rebuild the batches without a record in these folders (default: `unknown_folders`).

    Unreadable ones are skipped. Return the number rebuilt, and the folders to retry: busy ones, and
    those left after `seconds`. Raise `StoreError`.
    """
    deadline = time.monotonic() + seconds
    names = unknown_folders(queue, file_store) if names is None else names
    count, busy = 0, list[str]()
    for place, name in enumerate(names, 1):
        try:
            count += rebuild(queue, join(file_store, BATCHES_FOLDER, name))
        except (Busy, Superseded):
            busy.append(name)
        except StoreError as error:
            logger.error("failed to rebuild batch %s; retrying later: %s", name, error)
        if time.monotonic() >= deadline:
            return count, [*names[place:], *busy]
    return count, busy


def rebuild(queue: Queue, root: str) -> bool:
    """Create the record of the batch in `root`.

    Return False if it has one, or if there is no batch (any more). Raise `StoreError`, `Busy` and
    `Superseded`.
    """
    with hold(queue, root, patience=0):
        manifest = load_manifest(root)
        if manifest is None or is_deleted(root):
            return False
        record = queue.batch_fields(manifest.batch_id)
        if record.exists:
            return False
        if record.state or manifest.state not in END_STATES:
            # Remains of a start that was killed while it removed a record.
            queue.forget(manifest.batch_id)
        manifest.generation = max(manifest.generation, record.generation)
        if manifest.state in END_STATES and _was_cancelled(manifest):
            manifest.end_cancelled()
            note_webhook(queue, manifest.batch_id, manifest.spec, manifest.state)
            save_manifest(manifest)
        register(queue, manifest)
    return True


def _was_cancelled(manifest: Manifest) -> bool:
    """Return whether an ended API batch was cancelled before its end was recorded.

    The mark is removed afterwards (`retention.tidy`).
    """
    spec = manifest.spec
    return manifest.state != "cancelled" and spec.of_api and is_marked_cancelled(spec.root)
