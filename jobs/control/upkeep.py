"""Upkeep: the leading ticker's work on files, in a thread of its own since disks may be slow.

It cleans up after ended batches, restores data to a restarted or emptied server, removes expired
and deleted files and batches, publishes the weights of tenants, and saves the usage of API keys.
"""

import logging
import secrets
import threading
import time
from typing import NamedTuple

import redis

from jobs.batch.ending import clean_up
from jobs.batch.forgetting import finish_deletions
from jobs.batch.rebuild import rebuild_all, unknown_folders
from jobs.batch.retention import forget_output, remove_ended
from jobs.queue import keys
from jobs.queue.request_queue import KeyUsage, Queue
from jobs.store.api_keys import KeyRing
from jobs.store.file_store import FileStore
from jobs.store.idempotency import IdempotencyKeys
from jobs.store.key_usage import behind, larger, load_usage, save_usage
from jobs.store.marker import StoreAway
from jobs.store.owner import StoreOwner
from jobs.store.storage import Busy, StoreError, path_of
from jobs.store.upload_store import UploadStore

SWEEP_SECONDS = 60.0
WEIGHTS_SECONDS = 2.0
USAGE_SECONDS = 10.0
MOMENT_SECONDS = 0.5
"""Time per step for work that grows with the number of batches and files."""

logger = logging.getLogger(__name__)


class _OpenedStore(NamedTuple):
    files: FileStore
    idempotency_keys: IdempotencyKeys
    keys: KeyRing


class Upkeep:
    """The upkeep of a queue, and of its `file_store` if there is one."""

    def __init__(self, queue: Queue, file_store: str | None = None) -> None:
        self.ended: list[str] = []
        """Ended batches that may have remains."""
        self._queue = queue
        self._file_store = file_store
        self._store: _OpenedStore | None = None  # None until it has answered
        self._owner = None if file_store is None else StoreOwner(queue, path_of(file_store))
        self._owner_problem = ""  # the last reason why the store could not be used
        self._renewing = threading.Lock()
        self._next_weights = 0.0  # this and the next: monotonic seconds
        self._next_usage = 0.0
        self._weights: dict[str, float] | None = None  # as published; None: Redis may have others
        self._usage: KeyUsage | None = None  # of API keys, as saved; None: another ticker may have saved more
        self._weights_problem = ""  # the last reason why they could not be published
        self._token = secrets.token_hex(8).encode()
        self._next_sweep = 0.0  # monotonic seconds
        # Folders to check for batches without a record.
        self._unknown: list[str] = []
        self._unlisted: list[str] = []  # files to index again
        self._deleted = ""  # the last deletion that was completed; the next ones follow it

    def is_due(self, run_id: bytes | None, restored: bytes | None) -> bool:
        """Return whether there is something to do, by these notes of the ticker in Redis."""
        if self._file_store is None:
            return bool(self.ended)
        lost = restored != self._server(run_id) or self._unknown or self._unlisted
        return bool(
            self.ended or lost or time.monotonic() >= min(self._next_sweep, self._next_weights, self._next_usage)
        )

    def renew_owner(self) -> bool:
        """Write this queue's heartbeat to its file store, and return whether the store may be used.

        Raise what redis-py raises.
        """
        if self._owner is None:
            return True
        with self._renewing:
            problem = ""
            try:
                self._owner.renew()
            except StoreAway as error:
                problem = f"upkeep of the file store paused (no expiry, no rebuild): {error}"
            except StoreError as error:
                problem = f"failed to write a heartbeat to the file store; retrying: {error}"
            if problem and problem != self._owner_problem:
                logger.error("%s", problem)
            self._owner_problem = problem
            return self._owner.is_ours

    def run_once(self) -> None:
        """Do the work that is due. Raise what redis-py raises."""
        for batch in self.ended:
            clean_up(self._queue, batch)
        if self._file_store is None:
            return
        try:
            store = self._store = self._store or self._open(self._file_store)
        except StoreError as error:
            logger.error("failed to open the file store; retrying: %s", error)
            return
        if not self._may_use_store():
            return
        try:
            self._restore(store.files)
        except StoreError as error:
            logger.error("failed to restore batches and files that Redis lost; retrying: %s", error)
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            self._sweep(store)
        if time.monotonic() >= self._next_usage:
            self._save_usage(store.files)
        if time.monotonic() >= self._next_weights:  # last, since a full Redis accepts none
            self._publish_weights(store.keys)

    def _open(self, location: str) -> _OpenedStore:
        """Open the store; a starting ticker does not wait for this. Raise `StoreError`."""
        files = FileStore(self._queue, location, forget_output)
        return _OpenedStore(files, IdempotencyKeys(self._queue, files), KeyRing(location))

    def _may_use_store(self) -> bool:
        return self._owner is None or self._owner.is_ours or self.renew_owner()

    def _restore(self, files: FileStore) -> None:
        """Restore data that Redis has lost, a moment's work at a time."""
        run_id, noted = self._queue.commands([["HMGET", keys.TICK, "run_id", "restored"]])[0]
        server = self._server(run_id)
        is_new = noted != server
        if is_new or self._unknown or self._unlisted:
            files.check()
        if is_new:
            self._weights, self._usage, self._next_usage = None, None, 0.0
            self._deleted = finish_deletions(self._queue, files, self._now(), MOMENT_SECONDS, self._deleted)
            self._unknown, self._unlisted = unknown_folders(self._queue, str(files.root)), files.names()
            self._queue.redis.hset(keys.TICK, "restored", server)
        count, self._unknown = rebuild_all(self._queue, str(files.root), self._unknown, MOMENT_SECONDS)
        self._unlisted = files.reindex(self._unlisted, MOMENT_SECONDS)
        if count:
            logger.warning("rebuilt %d batches that were missing from Redis", count)

    def _publish_weights(self, ring: KeyRing) -> None:
        self._next_weights = time.monotonic() + WEIGHTS_SECONDS
        try:
            weights = ring.look().weights()
            if weights != self._weights:
                self._queue.set_weights(weights)
            self._weights, self._weights_problem = weights, ""
        except (StoreError, redis.exceptions.OutOfMemoryError) as error:
            self._next_weights = time.monotonic() + SWEEP_SECONDS
            if str(error) != self._weights_problem:
                self._weights_problem = str(error)
                logger.error("failed to publish the weights of tenants; retrying every %d s: %s", SWEEP_SECONDS, error)

    def _save_usage(self, files: FileStore) -> None:
        self._next_usage = time.monotonic() + USAGE_SECONDS
        try:
            files.check()
            saved = load_usage(files.root) if self._usage is None else self._usage
            found = self._queue.key_usage()
            self._queue.raise_key_usage(behind(found, saved))
            usage = larger(saved, found)
            self._usage = saved if usage == saved else save_usage(files.root, usage)
        except (StoreError, Busy) as error:
            self._next_usage = time.monotonic() + SWEEP_SECONDS
            logger.error("failed to save the usage of API keys; retrying in %d s: %s", SWEEP_SECONDS, error)

    def _server(self, run_id: bytes | None) -> bytes:
        """Return the note that all is restored.

        It names this ticker too, since the rest of another ticker's list may be lost.
        """
        return (run_id or b"") + b" " + self._token

    def _now(self) -> float:
        # Removal is final, so the file must have expired by this machine's clock, too.
        return min(self._queue.now(), time.time())

    def _sweep(self, store: _OpenedStore) -> None:
        files, now = store.files, self._now()
        try:
            swept = files.sweep(now, MOMENT_SECONDS)
            self._deleted = finish_deletions(self._queue, files, now, MOMENT_SECONDS, self._deleted)
            ended = remove_ended(self._queue, str(files.root), now, MOMENT_SECONDS)
            # Including batches whose process was killed before it wrote the record in Redis.
            self._unknown = unknown_folders(self._queue, str(files.root))
            uploads = UploadStore(self._queue, files).sweep(now, MOMENT_SECONDS)
            store.idempotency_keys.sweep(now, MOMENT_SECONDS)
        except StoreError as error:
            logger.error("failed to remove expired files; retrying in %d s: %s", SWEEP_SECONDS, error)
            return
        if swept or uploads or ended:
            logger.info("removed %d expired files, %d uploads and %d expired batches", swept, uploads, ended)
