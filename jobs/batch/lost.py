"""A batch whose folder, or the manifest in it, is gone can never go on: it ends in Redis alone."""

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
    """End a batch whose folder has been gone for `lost_batch_seconds`; until then note since when
    it is.
    """
    fields = queue.batch_fields(batch)
    if fields.state not in JOBS or not fields.spec:
        return
    try:
        reason = why_lost(queue, batch, fields)
    except StoreError:  # nothing can be said of it
        reason = None
    now = queue.now()
    since = 0.0 if reason is None else fields.lost_since or now
    if since != fields.lost_since:
        queue.transition(batch, [fields.state], fields.state, {"lost_since": since})
    if reason is not None and now - since >= queue.settings.lost_batch_seconds:
        end_lost(queue, batch, fields, reason)


def why_lost(queue: Queue, batch: str, fields: BatchFields) -> str | None:
    """Return why a batch can never go on; None if it can. Raise `StoreError` where that cannot be
    said, as while the file store is away.
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
    """End the batch as `failed`, one that is being cancelled as `cancelled`, unless it moved on.

    What a kill leaves of it in Redis is removed by the ticker.
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
