"""Lost batches: without the folder or its manifest, a batch cannot continue and ends in Redis."""

import logging
import time

from jobs.batch.ending import clean_up
from jobs.batch.manifest import ManifestDamaged, decode_spec, load_manifest
from jobs.batch.result_files import drop_partial_output
from jobs.batch.webhook_notes import note_webhook
from jobs.protocol.states import JOBS
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.store.marker import check_store
from jobs.store.storage import StoreError, path_of

logger = logging.getLogger(__name__)


def end_if_lost(queue: Queue, batch: str) -> None:
    """End a batch whose folder has been missing for `lost_batch_seconds`; before, store since
    when.
    """
    fields = queue.batch_fields(batch)
    if fields.state not in JOBS or not fields.spec:
        return
    try:
        reason = why_lost(queue, batch, fields)
    except StoreError:  # it is unknown
        reason = None
    now = queue.now()
    since = 0.0 if reason is None else fields.lost_since or now
    if since != fields.lost_since:
        queue.transition(batch, [fields.state], fields.state, {"lost_since": since})
    if reason is not None and now - since >= queue.settings.lost_batch_seconds:
        end_lost(queue, batch, fields, reason)


def why_lost(queue: Queue, batch: str, fields: BatchFields) -> str | None:
    """Return why a batch can never continue; None if it can.

    Raise `StoreError` if that is unknown, for example while the file store is unavailable.
    """
    if decode_spec(fields.spec).of_api:
        check_store(queue, path_of(fields.root).parents[1])
    try:
        manifest = load_manifest(fields.root)
    except ManifestDamaged as error:
        return str(error)
    if manifest is None or manifest.batch_id != batch:
        return f"the folder {fields.root} of {batch}, or the manifest in it, is gone"
    return None


def end_lost(queue: Queue, batch: str, fields: BatchFields, reason: str) -> None:
    """End the batch as `failed`, or as `cancelled` if it is being cancelled, unless its state
    changed.

    The ticker removes the remains in Redis after a kill.
    """
    if fields.state not in JOBS:
        return
    state = "cancelled" if fields.state == "cancelling" else "failed"
    spec = decode_spec(fields.spec)
    note_webhook(queue, batch, spec, state)
    changes = {"problem": reason, "lost": True, "timestamps": {state: time.time()}}
    if queue.transition(batch, [fields.state], state, changes, fields.generation):
        logger.error("batch %s ends as %s: %s", batch, state, reason)
        clean_up(queue, batch)
        drop_partial_output(queue, spec)
