"""The queue that owns a bucket, so that a fleet with another Redis is refused.

Each ticker replaces an object with the id of its queue every few seconds, as a heartbeat. If that
object has the id of another queue and is not replaced for some time, its fleet was stopped, or its
Redis came back empty. Folders have no such object: their locks separate the processes of one
machine.
"""

import logging
import secrets
import time
from pathlib import PurePath
from typing import NamedTuple

import redis

from jobs.queue.base import QueueBase
from jobs.queue.scripts import QueueUnavailable, Scripts
from jobs.store.marker import StoreAway, open_store
from jobs.store.storage import Stored, StoreError, is_local, is_missing, join, read_version, write_version

OWNER = "owner"
HEARTBEAT_SECONDS = 3.0
OWNER_TIMEOUT_SECONDS = 10.0
"""An owner without a heartbeat for this long is replaced."""
_POLL_SECONDS = 0.5
_LONGEST_LOOK = 2.0  # most seconds that one check adds, however long ago the last check was

logger = logging.getLogger(__name__)


def open_own_store(queue: QueueBase, root: PurePath) -> None:
    """Open a store at the start of a command, like `open_store`.

    Also raise `StoreAway` if a fleet with another Redis uses it.
    """
    owner = StoreOwner(queue, root)
    if not owner.renew():
        logger.warning(
            "the file store %s was last used with another Redis, or with this one before it was emptied; starting"
            " unless there is a heartbeat of that fleet within %d s",
            root,
            OWNER_TIMEOUT_SECONDS,
        )
        while not owner.renew():
            time.sleep(_POLL_SECONDS)
    open_store(queue, root)


class _OtherOwner(NamedTuple):
    version: str  # of its last heartbeat
    seen_at: float  # monotonic seconds of the last check
    seen_for: float  # seconds without another heartbeat
    is_running: bool  # there was a heartbeat before this one


class StoreOwner:
    """The owner of a store, for one process. Not thread-safe."""

    def __init__(self, queue: QueueBase, root: PurePath) -> None:
        self.is_ours = False
        """Whether the store belonged to this queue at the last check."""
        self._queue = queue
        self._root = root
        self._location = join(str(root), OWNER)
        self._queue_id = ""
        self._version: str | None = None  # of the object, if it has this queue's id
        self._other: _OtherOwner | None = None

    def renew(self) -> bool:
        """Write a heartbeat, except at the first sight of an object with this queue's id.

        Return whether the store belongs to this queue; False until that is known.

        Raise `StoreError`, `StoreAway` while another queue uses the store, and what redis-py raises
        until Redis has answered this process once.
        """
        self.is_ours = is_local(self._location) or self._renew(self._known_id())
        return self.is_ours

    def _renew(self, queue_id: str) -> bool:
        content = f"{queue_id} {secrets.token_hex(8)}\n".encode()
        if self._version is not None:
            self._version = write_version(self._location, content, self._version)
        if self._version is None:
            found = self._read()
            if found is not None and found.data.split()[:1] == [queue_id.encode()]:
                self._version = found.version
            elif found is None or self._is_expired(found.version):
                self._version = write_version(self._location, content, None if found is None else found.version)
        if self._version is not None:
            self._other = None
        return self._version is not None

    def _is_expired(self, version: str) -> bool:
        """Return whether another queue's heartbeats have stopped. Raise `StoreAway` if they have
        not.
        """
        now, other = time.monotonic(), self._other
        if other is None or other.version != version:
            self._other = _OtherOwner(version, now, 0.0, is_running=other is not None)
        else:
            seen_for = other.seen_for + min(now - other.seen_at, _LONGEST_LOOK)
            self._other = other._replace(seen_at=now, seen_for=seen_for)
        if self._other.seen_for >= OWNER_TIMEOUT_SECONDS:
            return True
        if self._other.is_running:
            raise StoreAway(
                f"the file store {self._root} is used by a fleet with another Redis: set REDIS_URL to that one, or"
                f" name another prefix; if that fleet was stopped just now, start again in"
                f" {OWNER_TIMEOUT_SECONDS:.0f} s"
            )
        return False

    def _read(self) -> Stored | None:
        try:
            return read_version(self._location)
        except StoreError as error:
            if not is_missing(error):
                raise
        return None

    def _known_id(self) -> str:
        """Return the id of this queue; an emptied Redis gets a new one.

        While Redis is unavailable, return the last id.
        """
        retry_seconds = 0.0 if self._queue_id else self._queue.settings.redis_retry_seconds
        try:
            drawn = f"queue_{secrets.token_hex(8)}"
            self._queue_id = Scripts(self._queue.redis, retry_seconds).call("queue_id", [drawn]).decode()
        except (redis.RedisError, QueueUnavailable):
            if not self._queue_id:
                raise
        return self._queue_id
