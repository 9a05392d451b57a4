"""Register: create the record of a batch in Redis from its manifest, and hand it out."""

import contextlib
import logging
import secrets
from typing import Any

import msgspec
import redis

from jobs.batch.ending import clean_up
from jobs.batch.manifest import Manifest, end_fields, is_marked_cancelled, progress_fields, save_manifest
from jobs.protocol.states import END_STATES, State
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import passing_reason
from jobs.queue.tasks import hand_out
from jobs.store.storage import StoreError, size_of

logger = logging.getLogger(__name__)


def register(queue: Queue, manifest: Manifest) -> None:
    """Make the record that the manifest describes and hand it out; for the holder of
    `storage.exclusive`.

    A running batch comes back as `validating`: that job finds the plan made, counts what the parts
    hold, and goes on.
    """
    state = _state_after(manifest)
    # No process works on one that has ended
    if state not in END_STATES or state != manifest.state:
        manifest.enter(state)
        manifest.generation += 1
        manifest.owner = secrets.token_hex(8)
        save_manifest(manifest)
    fields = _record(manifest)
    if manifest.spec.of_api:
        queue.list_batch(manifest.spec.tenant, manifest.batch_id)
    if state not in END_STATES and manifest.spec.of_api:
        queue.open_batch(manifest.spec.tenant, manifest.batch_id, None)
    # Before there is a record, so that no kill leaves a record without a batch in `ACTIVE`
    if state not in END_STATES:
        queue.activate(manifest.batch_id)
    total = manifest.total if manifest.plan_sha256 is not None else 0
    if not queue.create_batch(manifest.batch_id, total, tenant=manifest.spec.tenant, state=state, fields=fields):
        return
    if state in END_STATES:
        clean_up(queue, manifest.batch_id)
        return
    try:
        hand_out(queue, manifest.batch_id)
    except redis.RedisError as error:  # the batch exists; the ticker hands it out later
        if passing_reason(error) is None:
            raise
        logger.warning("Redis refused to hand out batch %s; the ticker does it later: %s", manifest.batch_id, error)


def _state_after(manifest: Manifest) -> State:
    """The state to go on from: what was cancelled stays so, all else is counted again (and expires
    again).
    """
    if manifest.state in END_STATES:
        return manifest.state
    return "cancelling" if is_marked_cancelled(manifest.spec.root) else "validating"


def _input_bytes(manifest: Manifest) -> int:
    """Return the size of the batch's input, 0 where it is unknown."""
    if manifest.input_bytes is None and manifest.spec.input:
        with contextlib.suppress(StoreError):
            return size_of(manifest.spec.input) or 0
    return manifest.input_bytes or 0


def _record(manifest: Manifest) -> dict[str, Any]:
    spec = manifest.spec
    fields: dict[str, Any] = {
        "root": spec.root,
        "spec": msgspec.json.encode(spec),
        "timestamps": {"created": manifest.created_at, **manifest.timestamps},
        "generation": manifest.generation,
        "owner": manifest.owner,
        "outcome": manifest.outcome,
        "input_bytes": _input_bytes(manifest),
        "queued_tokens": manifest.queued_tokens,
        "line_models": manifest.models,
        **progress_fields(manifest),
    }
    if spec.completion_window_seconds is not None:
        fields["expires_at"] = manifest.created_at + spec.completion_window_seconds
    if manifest.state in END_STATES:
        fields |= end_fields(manifest)
    return fields
