"""Register: create the record of a batch in Redis from its manifest, and dispatch the batch."""

import contextlib
import logging
import secrets
from typing import Any

import msgspec
import redis

from jobs.batch.ending import clean_up
from jobs.batch.input_files import InputError, format_of
from jobs.batch.manifest import Manifest, end_fields, is_marked_cancelled, progress_fields, save_manifest
from jobs.protocol.states import END_STATES, State
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import passing_reason
from jobs.queue.tasks import hand_out
from jobs.store.input_formats import JSONL
from jobs.store.storage import StoreError, size_of

logger = logging.getLogger(__name__)


def register(queue: Queue, manifest: Manifest) -> BatchFields:
    """Create and return the record that the manifest describes, and dispatch the batch.

    The caller must hold `storage.exclusive`. A running batch starts as `validating`: that job finds
    the plan, counts the lines of the parts, and continues.
    """
    state = _state_after(manifest)
    # No process works on an ended batch.
    if state not in END_STATES or state != manifest.state:
        manifest.enter(state)
        manifest.generation += 1
        manifest.owner = secrets.token_hex(8)
        save_manifest(manifest)
    tenant, fields = manifest.spec.tenant, _record(manifest)
    # Announced first, so that no kill leaves a record without a batch in `ACTIVE`.
    queue.announce(tenant, manifest.batch_id, listed=manifest.spec.of_api, runs=state not in END_STATES)
    total = manifest.total if manifest.plan_sha256 is not None else 0
    made = BatchFields().changed({"state": state, "tenant": tenant, "total": total, **fields})
    if not queue.create_batch(manifest.batch_id, total, tenant=tenant, state=state, fields=fields):
        return made
    if state in END_STATES:
        clean_up(queue, manifest.batch_id)
        return made
    try:
        hand_out(queue, manifest.batch_id)
    except redis.RedisError as error:  # the batch exists; the ticker dispatches it later
        if passing_reason(error) is None:
            raise
        logger.warning("Redis refused to dispatch batch %s; the ticker will retry: %s", manifest.batch_id, error)
    return made


def _state_after(manifest: Manifest) -> State:
    """Return the state to continue from.

    A cancelled batch stays cancelled; any other is validated again (and may expire again).
    """
    if manifest.state in END_STATES:
        return manifest.state
    return "cancelling" if is_marked_cancelled(manifest.spec.root) else "validating"


def _input_bytes(manifest: Manifest) -> int:
    """Return the size of the batch's input; 0 if it is unknown or compressed."""
    location = manifest.spec.input
    if manifest.plan_sha256 is None and location:
        with contextlib.suppress(StoreError, InputError):
            return (size_of(location) or 0) if format_of(location) == JSONL else 0
    return manifest.input_bytes or 0


def _record(manifest: Manifest) -> dict[str, Any]:
    spec, window = manifest.spec, manifest.spec.completion_window_seconds
    expires = {} if window is None else {"expires": manifest.created_at + window}
    fields: dict[str, Any] = {
        "root": spec.root,
        "spec": msgspec.json.encode(spec).decode(),
        "timestamps": {"created": manifest.created_at, **expires, **manifest.timestamps},
        "generation": manifest.generation,
        "owner": manifest.owner,
        "priority": spec.priority,
        "key_id": spec.key_id,
        "open": manifest.is_open,
        "outcome": manifest.outcome,
        "input_bytes": _input_bytes(manifest),
        "queued_tokens": manifest.queued_tokens,
        "line_models": manifest.models,
        **progress_fields(manifest),
    }
    if manifest.state in END_STATES:
        fields |= end_fields(manifest)
    return fields
