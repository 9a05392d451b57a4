"""The file store: clients' uploads and batches' results, each in a folder of its own.

The disk is authoritative; Redis holds an index that `reindex` rebuilds. A file exists once its
record.json does. Until then its folder is in `keys.FILE_EXPIRY`, so that the sweep finds the
remains of a killed upload.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, Literal

import msgspec
import redis

from jobs.protocol.ids import FILE, is_id, micros_of, new_id
from jobs.protocol.period import ALWAYS, Period
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.store.input_formats import HEAD_BYTES, format_of_upload
from jobs.store.marker import BATCHES_FOLDER, FILES_FOLDER, StoreAway, check_store, open_store
from jobs.store.storage import (
    StoreError,
    UnnamedFile,
    begin_folder,
    clear_folder,
    exists,
    is_local,
    is_missing,
    list_names,
    local_path,
    make_folder,
    named,
    path_of,
    read_bytes,
    sync_folder,
    write_bytes,
    write_new,
)

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
"""The purposes of uploads."""
RESULT_PURPOSE = "batch_output"
BATCH_FILE_SECONDS = 30 * 24 * 3600
"""How long files of batches and their results are kept unless the client sets a time.

Other files do not expire.
"""
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 24 * 3600

_RECORD = "record.json"
_PART, _CONTENT = "content.part", "content"
_RETRY_SECONDS = 3600  # until the next attempt to read or remove a file that failed
_UPLOAD_SECONDS = 24 * 3600  # until a folder without a record is abandoned
_PLACE_DIGITS = 16  # in a member of a listing
_PLACE_SECONDS = 6 * 3600
_GROUP = 500  # records, or files to sweep, in one step

logger = logging.getLogger(__name__)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of record.json.

    Times are unix seconds; `suffix` is that of the content's name in the store.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    tenant: str
    suffix: str
    batch_id: str | None = None  # batch of a result file
    # False: the result file of a batch that has not ended; its content is the completion log.
    complete: bool = True
    content: str | None = None  # its name in the folder of the file; None: "content" with the suffix


_decode = msgspec.json.Decoder(FileRecord).decode


class FilePage(msgspec.Struct, frozen=True):
    """A part of a listing."""

    items: list[FileRecord]
    has_more: bool


class FileStore:
    """The files of all tenants. Synchronous and thread-safe.

    Methods raise `StoreError`, and those that use the index `QueueUnavailable`.
    """

    def __init__(self, queue: Queue, root: str, forget_output: Callable[[str, str], None]) -> None:
        """Set `forget_output(root, file_id)`, which removes a batch's data for a removed output
        file.
        """
        self.root = path_of(root)
        self._queue = queue
        self._forget_output = forget_output
        self._folder = self.root / FILES_FOLDER
        self._opened = False

    def check(self) -> None:
        """Raise `StoreAway` if the folder is not mounted, or does not belong to this queue."""
        (check_store if self._opened else open_store)(self._queue, self.root)
        self._opened = True

    def begin(self, *, filename: str, purpose: str, tenant: str, expires_seconds: int | None = None) -> "Upload":
        """Begin an upload; purpose and expiry may be changed until its commit.

        Without a commit, nothing remains.
        """
        self.check()
        now = self._queue.now()
        file_id = new_id(FILE, now)
        self._queue.commands([("ZADD", keys.FILE_EXPIRY, now + _UPLOAD_SECONDS, file_id)])
        return Upload(self, file_id, filename, purpose, tenant, expires_seconds)

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record.

        Raise KeyError for an unknown or expired file, another tenant's, and a malformed id.
        """
        record = self._read(file_id) if is_id(FILE, file_id) else None
        if record is None or record.tenant != tenant or _expired(record, time.time()):
            raise KeyError(file_id)
        return record

    def folder(self, file_id: str) -> PurePath:
        """Return the folder of a file."""
        return self._folder / file_id

    def batch_root(self, batch_id: str) -> PurePath:
        """Return the folder of a batch."""
        return self.root / BATCHES_FOLDER / batch_id

    def content_path(self, record: FileRecord) -> PurePath:
        """Return the path of a complete file's content."""
        return self.folder(record.id) / (record.content or f"content{record.suffix}")

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raise KeyError like `get`."""
        self._remove(self.get(tenant, file_id))

    def put(self, record: FileRecord) -> None:
        """Store and index a file's record, or replace it.

        The content of a complete file must be on disk.
        """
        self.check()
        folder = self.folder(record.id)
        make_folder(str(folder))
        write_bytes(str(folder / _RECORD), msgspec.json.encode(record))
        with named("cannot write", str(folder)):
            sync_folder(self._folder)
        self._queue.commands(_index(record))

    def add(self, record: FileRecord) -> None:
        """Store and index the record of an uploaded file.

        Raise `StoreError` if the upload was abandoned; in a bucket another process may do so.
        """
        if is_local(str(self.root)):
            self.put(record)
            return
        self.check()
        if write_new(str(self.folder(record.id) / _RECORD), msgspec.json.encode(record)) is None:
            raise StoreError(f"the file {record.id} was given up before it was stored: upload it again")
        self._queue.commands(_index(record))

    def begin_result(self, record: FileRecord) -> None:
        """Store the record of an incomplete result file.

        In a bucket, an existing record stays: another process may have completed it.
        """
        if is_local(str(self.root)):
            self.put(record)
        else:
            self.check()
            write_new(str(self.folder(record.id) / _RECORD), msgspec.json.encode(record))

    def finish(self, file_id: str) -> FileRecord | None:
        """Finish an interrupted upload: return the file if it has a record, else remove it and
        return None.
        """
        folder = self.folder(file_id)
        # In a bucket the upload may still run: an empty record prevents it from writing one.
        if not is_local(str(folder)) and write_new(str(folder / _RECORD), b"") is not None:
            self._queue.commands([("ZADD", keys.FILE_EXPIRY, self._queue.now() + _UPLOAD_SECONDS, file_id)])
            return None
        record = self._read(file_id)
        if record is None:
            self.drop(file_id)
            return None
        with named("cannot write", str(folder)):
            sync_folder(folder)
            sync_folder(self._folder)
        self._queue.commands(_index(record))
        return record

    def drop(self, file_id: str) -> None:
        """Remove the remains of an aborted upload; the sweep removes the rest."""
        folder = str(self.folder(file_id))
        with contextlib.suppress(StoreError):
            clear_folder(folder, _RECORD)
        if not exists(folder):
            with contextlib.suppress(redis.RedisError):
                self._queue.redis.zrem(keys.FILE_EXPIRY, file_id)

    def sweep(self, now: float, seconds: float = math.inf) -> int:
        """Remove expired files and day-old remains of killed uploads, some hundreds or for
        `seconds`.

        Return the number removed. A file that cannot be removed is retried later, so that it delays
        no others.
        """
        self.check()
        removed, deadline = 0, time.monotonic() + seconds
        [due] = self._queue.commands([("ZRANGE", keys.FILE_EXPIRY, "-inf", now, "BYSCORE", "LIMIT", 0, _GROUP)])
        for file_id in (name.decode() for name in due):
            try:
                removed += self._sweep_one(file_id, now)
            except StoreAway:
                raise
            except StoreError as error:
                logger.error("failed to remove file %s; retrying later: %s", file_id, error)
                self._queue.commands([("ZADD", keys.FILE_EXPIRY, now + _RETRY_SECONDS, file_id)])
            if time.monotonic() >= deadline:
                break
        return removed

    def names(self) -> list[str]:
        """Return the ids of all files and uploads, newest first."""
        return sorted(filter(partial(is_id, FILE), list_names(str(self._folder))), reverse=True)

    def reindex(self, names: "list[str]", seconds: float = math.inf) -> "list[str]":
        """Rebuild the index in Redis of these files.

        Return the files that are left after `seconds`.
        """
        if not names:
            return names
        now, deadline = self._queue.now(), time.monotonic() + seconds
        while names:
            self._queue.commands(command for name in names[:_GROUP] for command in self._reindexed(name, now))
            names = names[_GROUP:]
            if time.monotonic() >= deadline:
                break
        return names

    def _reindexed(self, file_id: str, now: float) -> Sequence[tuple[Any, ...]]:
        """Return the commands that index a file; an unreadable one is scheduled for the sweep."""
        try:
            record = self._read(file_id)
        except StoreAway:
            raise
        except StoreError as error:
            logger.error("failed to index file %s; retrying later: %s", file_id, error)
            return [("ZADD", keys.FILE_EXPIRY, "NX", now + _RETRY_SECONDS, file_id)]
        return [("ZADD", keys.FILE_EXPIRY, "NX", now + _UPLOAD_SECONDS, file_id)] if record is None else _index(record)

    def list(
        self,
        tenant: str,
        *,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
        purpose: str | None,
        created: Period = ALWAYS,
    ) -> FilePage:
        """Return complete files created in the period, in order of creation, after `after`.

        That file may have been deleted. Raise KeyError if `after` is not a file's id.
        """
        self.check()
        name = keys.files(tenant, purpose or "")
        place = None if after is None else self._place(tenant, after)
        found: Any = []
        while len(found) <= limit:
            members = self._members(name, place, order, limit + 1 - len(found), created)
            if not members:
                break
            place = members[-1]
            found += self._present(name, members)
        return FilePage(found[:limit], len(found) > limit)

    def _members(self, name: str, behind: str | None, order: str, count: int, created: Period) -> Any:
        """Return members of a listing, in its order."""
        first, end = created.names("", _PLACE_DIGITS)
        low, high = "-" if first is None else f"[{first}", "+" if end is None else f"({end}"
        if behind and order == "asc" and behind >= (first or ""):
            low = f"({behind}"
        elif behind and order == "desc" and (end is None or behind < end):
            high = f"({behind}"
        bounds = [low, high] if order == "asc" else [high, low]
        direction = [] if order == "asc" else ["REV"]
        [members] = self._queue.commands([("ZRANGE", name, *bounds, "BYLEX", *direction, "LIMIT", 0, count)])
        return [member.decode() for member in members]

    def _present(self, name: str, members: Any) -> Any:
        """Return the records of a listing's members, except those that are gone or unreadable.

        A record is written before it is listed, and removed first.
        """
        now = time.time()
        found: Any = []
        for member in members:
            try:
                record = self._read(member.partition(":")[2])
            except StoreAway:
                raise
            except StoreError as error:
                logger.error("omitting file %s from a listing: %s", member.partition(":")[2], error)
                continue
            # For a result that was finished twice, only the first place counts.
            if record is None or member != _member(record):
                self._queue.commands([("ZREM", name, member)])
            elif not _expired(record, now):
                found.append(record)
        return found

    def _place(self, tenant: str, file_id: str) -> str:
        """Return the member that a file has, or had, in listings."""
        if not is_id(FILE, file_id):
            raise KeyError(file_id)
        record = self._read(file_id)
        if record is not None and record.tenant == tenant:
            return _member(record)
        [place] = self._queue.commands([("GET", keys.file_place(file_id))])
        return str(place.decode()) if place is not None else _named_member(micros_of(FILE, file_id), file_id)

    def _read(self, file_id: str) -> FileRecord | None:
        """Return a record; None if it is missing from a mounted store.

        Reads twice, since a file system may be remounted meanwhile.
        """
        record = self._record(file_id)
        for _ in range(2 if record is None else 0):
            self.check()
            record = record or self._record(file_id)
        return record

    def _record(self, file_id: str) -> FileRecord | None:
        path = str(self.folder(file_id) / _RECORD)
        try:
            data = read_bytes(path)
            return _decode(data) if data else None
        except msgspec.DecodeError as error:
            logger.error("%s is not a valid file record: %s", path, error)
        except StoreError as error:
            if not is_missing(error):
                raise
        return None

    def _sweep_one(self, file_id: str, now: float) -> bool:
        record = self._read(file_id)
        # The upload was killed between its record and its index.
        if record is not None and not _expired(record, now):
            self._queue.commands(_index(record))
            return False
        if record is not None:
            # A file that reappears after a power failure has expired as well.
            self._remove(record, durably=False)
            return True
        left = str(self.folder(file_id))
        found = exists(left)
        clear_folder(left, _RECORD, durably=False)
        self._queue.commands([("ZREM", keys.FILE_EXPIRY, file_id)])
        return found

    def _remove(self, record: FileRecord, durably: bool = True) -> None:
        clear_folder(str(self.folder(record.id)), _RECORD, durably)
        removals: Any = [("ZREM", keys.FILE_EXPIRY, record.id)]
        removals += [("ZREM", name, _member(record)) for name in _listings(record)]
        if record.batch_id is not None:  # its place differs from the time in its id
            removals += [("SET", keys.file_place(record.id), _member(record), "EX", _PLACE_SECONDS)]
        self._queue.commands(removals)
        if record.batch_id is not None:
            self._forget_output(str(self.batch_root(record.batch_id)), record.id)


class Upload:
    """A file being uploaded.

    Not thread-safe. Methods raise `StoreError`, and `StoreFull` for a full disk.
    """

    def __init__(
        self, store: FileStore, file_id: str, filename: str, purpose: str, tenant: str, expires_seconds: int | None
    ) -> None:
        self.purpose = purpose
        self.expires_seconds = expires_seconds
        self.bytes = 0
        self.folder = store.folder(file_id)
        self.head = b""  # the first bytes of the content, at most `HEAD_BYTES`
        self.id = file_id
        self.filename = filename
        self._store = store
        self._tenant = tenant
        self._committed = False
        begin_folder(str(self.folder))
        with named("cannot write", str(self.folder)):
            # An object has its final name from the start.
            self._content = None if local_path(str(self.folder)) else _CONTENT
            self._file = UnnamedFile(str(self.folder / (self._content or _PART)))

    def write(self, data: bytes) -> None:
        """Append data."""
        with named("cannot write", str(self.folder)):
            self._file.write(data)
        self.bytes += len(data)
        self.head += data[: HEAD_BYTES - len(self.head)]

    def commit(self) -> FileRecord:
        """Make the file durable, then index it.

        Raise ValueError for a batch's file whose name or content no batch can read.
        """
        record = self._record()
        with named("cannot write", str(self.folder)):
            self._file.sync()
            self._file.commit(str(self._store.content_path(record)))
        self._store.add(record)
        self._committed = True
        return record

    def close(self) -> None:
        """Remove uncommitted data."""
        # On a full disk, the rest of the buffer cannot be written.
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._committed:
            self._store.drop(self.id)

    def _record(self) -> FileRecord:
        created = micros_of(FILE, self.id) // 1_000_000
        of_batch = self.purpose == "batch"
        suffix = format_of_upload(self.filename, self.head) if of_batch else ""
        if suffix is None:
            raise ValueError(f"{self.filename} is no input file of batches")
        kept = BATCH_FILE_SECONDS if of_batch and self.expires_seconds is None else self.expires_seconds
        return FileRecord(
            id=self.id,
            bytes=self.bytes,
            created_at=created,
            filename=self.filename,
            purpose=self.purpose,
            expires_at=None if kept is None else created + kept,
            tenant=self._tenant,
            suffix=suffix,
            content=self._content,
        )

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _expired(record: FileRecord, now: float) -> bool:
    return record.expires_at is not None and record.expires_at <= now


def _index(record: FileRecord) -> list[tuple[Any, ...]]:
    """Return the commands that list a file and schedule its expiry."""
    expiry = ("ZREM", keys.FILE_EXPIRY, record.id)
    if not record.complete:
        return [expiry]
    if record.expires_at is not None:
        expiry = ("ZADD", keys.FILE_EXPIRY, record.expires_at, record.id)  # type: ignore[assignment]
    return [*(("ZADD", name, 0, _member(record)) for name in _listings(record)), expiry]


def _listings(record: FileRecord) -> tuple[str, str]:
    return keys.files(record.tenant), keys.files(record.tenant, record.purpose)


def _member(record: FileRecord) -> str:
    """Return a file's member of listings.

    A result file's id is older than the file, so its place comes from its record.
    """
    return _named_member(
        micros_of(FILE, record.id) if record.batch_id is None else record.created_at * 1_000_000, record.id
    )


def _named_member(micros: int, file_id: str) -> str:
    return f"{micros:0{_PLACE_DIGITS}x}:{file_id}"
