"""The marker of a file store: a file in its folder with the store's id, which Redis has too.

With the marker, a missing file is known to be gone. Without it, the folder may not be mounted or
may be another one, so missing files mean nothing.
"""

import secrets
from pathlib import PurePath
from typing import Any

from jobs.queue import keys
from jobs.queue.base import QueueBase
from jobs.queue.scripts import persistently
from jobs.store.storage import StoreError, exists, is_missing, make_folder, read_bytes, write_bytes, write_new

MARKER = "store_id"
BATCHES_FOLDER, FILES_FOLDER, UPLOADS_FOLDER = "batches", "files", "uploads"
DELETED_FOLDER, IDEMPOTENCY_FOLDER, WEBHOOKS_FOLDER = "deleted", "idempotency", "webhooks"


class StoreAway(StoreError):
    """The folder of the file store is not mounted, or it belongs to another queue."""


def open_store(queue: QueueBase, root: PurePath) -> None:
    """Check a store at a process' start, and mark it if it has no marker.

    A store without a marker is new or restored. An empty folder is not marked if Redis lists files:
    its file system may not be mounted. Raise `StoreAway` and `StoreError`.
    """
    if _read(root) is None and _known(queue) is None:
        if not _is_used(root) and _knows_files(queue):
            raise StoreAway(
                f"the file store {root} is empty, and Redis lists files and batches of it: mount it, or name the right"
                f" folder; to begin a new one, make the folder {root / FILES_FOLDER}"
            )
        _mark(root)
    check_store(queue, root)


def check_store(queue: QueueBase, root: PurePath) -> None:
    """Raise `StoreAway` unless the folder has the marker that Redis has.

    An emptied Redis takes over the folder's marker. It also replaces a marker in Redis that belongs
    to a folder used before the file system was mounted, if Redis lists no files.
    """
    found, known = _read(root), _known(queue)
    if found is not None and known is None:
        queue.commands([("SET", keys.STORE, found, "NX")])
        known = _known(queue)
    if found is not None and found != known and _is_used(root) and not _knows_files(queue):
        queue.commands([("SET", keys.STORE, found)])
        known = found
    if found is None:
        anew = f"; if its disk is lost, write {known} into that file to begin a new one" if known else ""
        raise StoreAway(
            f"the file store {root} has no file {MARKER}, so it is not mounted or not the one of this queue: mount it,"
            f" or name the right folder{anew}"
        )
    if found != known:
        raise StoreAway(
            f"the file store {root} is {found}, and that of this Redis is {known}: name the one folder that all of"
            f" `pipeline api` and `pipeline jobs` share, or use another Redis; if {root} is the right one and was"
            f" mounted too late, call `redis-cli DEL {keys.STORE}` once it is mounted everywhere"
        )


def _read(root: PurePath) -> str | None:
    try:
        return read_bytes(str(root / MARKER)).decode(errors="replace").strip() or None
    except StoreError as error:
        if not is_missing(error):
            raise
    return None


def _known(queue: QueueBase) -> str | None:
    [known] = queue.commands([("GET", keys.STORE)])
    return None if known is None else known.decode()


def _knows_files(queue: QueueBase) -> bool:
    """Return whether Redis lists files or batches of the API."""

    def search() -> bool:
        names: Any = (queue.redis.scan_iter(match, count=1000) for match in (keys.files("*"), keys.batch_index("*")))
        return any(name is not None for found in names for name in found)

    return persistently(search, queue.settings.redis_retry_seconds)


def _is_used(root: PurePath) -> bool:
    """Return whether the folder ever held files, uploads or batches."""
    return any(exists(str(root / name)) for name in (BATCHES_FOLDER, FILES_FOLDER, UPLOADS_FOLDER))


def _mark(root: PurePath) -> None:
    """Write a marker, whole and once: among several processes the first one writes it."""
    make_folder(str(root))
    location, mark = str(root / MARKER), f"store_{secrets.token_hex(8)}\n".encode()
    if write_new(location, mark) is None and _read(root) is None:  # it is empty
        write_bytes(location, mark)
