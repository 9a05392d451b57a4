"""Rebuild: makes the record of a batch in an empty Redis from its manifest.

The job that comes next takes up parts and plan.
"""

import logging
import math
import secrets
import time
from typing import Any

import msgspec
import redis

from jobs.batch_queue import FORGOTTEN
from jobs.control import clean_up, enqueue
from jobs.manifest import (
    END_STATES,
    Manifest,
    State,
    end_fields,
    is_marked_cancelled,
    load_manifest,
    progress_fields,
    save_manifest,
)
from jobs.queue import Queue
from jobs.retention import BATCHES_FOLDER
from jobs.scripts import passing_reason
from jobs.storage import Busy, StoreError, exclusive, join, list_names

log = logging.getLogger(__name__)


def unknown_folders(queue: Queue, file_store: str) -> list[str]:
    """Names of folders under `file_store` that may hold a batch without a record, the newest of the
    API first. Raises `StoreError`.
    """
    known = set(queue.batches())  # of the API's, a folder bears the name
    return [name for name in reversed(list_names(join(file_store, BATCHES_FOLDER))) if name not in known]


def rebuild_all(
    queue: Queue, file_store: str, names: list[str] | None = None, seconds: float = math.inf
) -> tuple[int, list[str]]:
    """Rebuilds the batches without a record in these folders (default: `unknown_folders`), passing
    over what cannot be read.

    Returns how many it rebuilt, and the folders to be tried again: in other hands, or left when
    `seconds` were over. Raises `StoreError`.
    """
    deadline = time.monotonic() + seconds
    names = unknown_folders(queue, file_store) if names is None else names
    count, busy = 0, list[str]()
    for place, name in enumerate(names, 1):
        try:
            count += rebuild(queue, join(file_store, BATCHES_FOLDER, name))
        except Busy:
            busy.append(name)
        except StoreError as error:
            log.error("cannot rebuild a batch: %s", error)
        if time.monotonic() >= deadline:
            return count, [*names[place:], *busy]
    return count, busy


def rebuild(queue: Queue, root: str) -> bool:
    """Makes the record of the batch in `root`; False if it has one, or there is no batch.

    Raises `StoreError` and `Busy`.
    """
    with exclusive(root, patience=0):
        manifest = load_manifest(root)
        if manifest is None:
            return False
        record = queue.batch_fields(manifest.batch_id)
        if record and record.get("state") != FORGOTTEN:
            return False
        if record or manifest.state not in END_STATES:
            # What a start that was killed while it removed a record has left
            queue.forget(manifest.batch_id)
        manifest.generation = max(manifest.generation, int(record.get("generation", 0)))
        if manifest.state in END_STATES and _was_cancelled(manifest):
            manifest.end_cancelled()
            save_manifest(manifest)
        register(queue, manifest)
    return True


def register(queue: Queue, manifest: Manifest) -> None:
    """Makes the record that the manifest describes and enqueues the job that comes next; for the
    holder of `storage.exclusive`.

    A running batch comes back as `validating`: that job finds the plan made, counts what the parts
    hold, and goes on.
    """
    state = _state_after(manifest)
    # On one that has ended nobody works any more
    if state not in END_STATES or state != manifest.state:
        manifest.enter(state)
        manifest.generation += 1
        manifest.owner = secrets.token_hex(8)
        save_manifest(manifest)
    fields = _record(manifest)
    if manifest.spec.input_file_id is not None:
        queue.list_batch(manifest.spec.tenant, manifest.batch_id)
    if state not in END_STATES and manifest.spec.input_file_id is not None:
        queue.open_batch(manifest.spec.tenant, manifest.batch_id, None)
    # Before there is a record, so that no kill leaves one that nobody looks after
    if state not in END_STATES:
        queue.activate(manifest.batch_id)
    total = manifest.total if manifest.plan_sha256 is not None else 0
    if not queue.create_batch(manifest.batch_id, total, tenant=manifest.spec.tenant, state=state, fields=fields):
        return
    if state in END_STATES:
        clean_up(queue, manifest.batch_id)
        return
    try:
        enqueue(
            queue.redis, "validate" if state == "validating" else "finalize", manifest.batch_id, manifest.generation
        )
    except redis.RedisError as error:  # the batch is made: the ticker hands in its job when Redis takes one again
        if passing_reason(error) is None:
            raise
        log.warning("%s waits for the ticker: %s", manifest.batch_id, error)


def _was_cancelled(manifest: Manifest) -> bool:
    """Whether an ended batch of the API was cancelled before its end was told; the mark goes once
    that is done (`retention.tidy`).
    """
    spec = manifest.spec
    return manifest.state != "cancelled" and spec.input_file_id is not None and is_marked_cancelled(spec.root)


def _state_after(manifest: Manifest) -> State:
    """The state to go on from: what was cancelled stays so, all else is counted again (and expires
    again).
    """
    if manifest.state in END_STATES:
        return manifest.state
    return "cancelling" if is_marked_cancelled(manifest.spec.root) else "validating"


def _record(manifest: Manifest) -> dict[str, Any]:
    spec = manifest.spec
    fields: dict[str, Any] = {
        "root": spec.root,
        "spec": msgspec.json.encode(spec),
        "created_at": manifest.created_at,
        "generation": manifest.generation,
        "owner": manifest.owner,
        "outcome": manifest.outcome,
        "queued_tokens": manifest.queued_tokens,
        "line_models": msgspec.json.encode(manifest.models),
        **progress_fields(manifest),
    }
    fields |= {f"{state}_at": moment for state, moment in manifest.timestamps.items()}
    if spec.completion_window_seconds is not None:
        fields["expires_at"] = manifest.created_at + spec.completion_window_seconds
    if manifest.state in END_STATES:
        fields |= end_fields(manifest)
    return fields
