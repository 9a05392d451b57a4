"""Uploads in parts: each has a folder in the file store, from its creation until a day later.

They are stored only on disk. The folder holds a record, upload.json, and each complete part under
its id. A change of the record takes the folder's lock exclusively, an added part takes it shared;
no call waits for it. A completion notes the id of the file that it will create: after a kill the
next one finds that file, or creates another.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from jobs.protocol import fields
from jobs.protocol.ids import PART, UPLOAD, is_id, new_id, time_of
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileRecord, FileStore, Upload
from jobs.store.leases import hold
from jobs.store.marker import UPLOADS_FOLDER
from jobs.store.storage import (
    Busy,
    StoreError,
    UnnamedFile,
    delete,
    exclusive,
    is_local,
    is_missing,
    join,
    list_names,
    make_folder,
    named,
    open_input,
    read_version,
    remove_tree,
    replace_version,
    shared,
    sizes_in,
    sync_folder,
    write_new,
)

PART_BYTES = 64 * 1024 * 1024
"""Most bytes of a part."""
MOST_PARTS = 10_000
"""Most parts of an upload."""

UploadStatus = Literal["pending", "completed", "cancelled", "expired"]

_RECORD, _LOCK = "upload.json", ".lock"
_OPEN_SECONDS = 3600  # how long an upload can be completed
_KEPT_SECONDS = 24 * 3600  # how long a completion may be repeated, and errors tell its outcome
_COPY_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The content of upload.json. Times are unix seconds."""

    id: str
    bytes: int  # announced by the client
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    tenant: str
    file_expires_seconds: int | None = None
    status: Literal["pending", "completed", "cancelled"] = "pending"
    # This and the next: of the last completion that was begun.
    file_id: str | None = None
    parts_sha256: str | None = None  # hash of the ids of its parts
    file: FileRecord | None = None  # of a completed upload

    def status_at(self, now: float) -> UploadStatus:
        """Return the status; `expired` follows from the time alone."""
        return "expired" if self.status == "pending" and self.expires_at <= now else self.status


_decode = msgspec.json.Decoder(UploadRecord).decode


class UploadStore:
    """The uploads of all tenants. Synchronous and thread-safe.

    Methods raise `ApiError`, 404 for an unknown upload or another tenant's, `StoreError` and
    `QueueUnavailable`.
    """

    def __init__(self, queue: Queue, files: FileStore) -> None:
        self._queue = queue
        self._files = files
        self._folder = files.root / UPLOADS_FOLDER

    def create(
        self,
        *,
        filename: str,
        purpose: str,
        size: int,
        tenant: str,
        file_expires_seconds: int | None = None,
        upload_id: str | None = None,
    ) -> UploadRecord:
        """Begin an upload of `size` bytes, durably."""
        self._files.check()
        now = self._queue.now()
        record = UploadRecord(
            id=upload_id or new_id(UPLOAD, now),
            bytes=size,
            created_at=int(now),
            expires_at=int(now) + _OPEN_SECONDS,
            filename=filename,
            purpose=purpose,
            tenant=tenant,
            file_expires_seconds=file_expires_seconds,
        )
        make_folder(str(self._folder / record.id))
        location, data = self._location(record.id), msgspec.json.encode(record)
        version = replace_version(location, data, "") if is_local(location) else write_new(location, data)
        if version is None:
            raise StoreError(f"there is an upload {record.id} already")
        return _of_version(record, version)

    def get(self, tenant: str, upload_id: str) -> UploadRecord:
        """Return an upload."""
        record = self.find(tenant, upload_id)
        if record is None:
            raise ApiError(404, f"No such Upload object: {fields.shown(upload_id)}", param="upload_id")
        return record

    def find(self, tenant: str, upload_id: str) -> UploadRecord | None:
        """Return an upload, or None if it is unknown or another tenant's."""
        record = self._read(upload_id) if is_id(UPLOAD, upload_id) else None
        return record if record is not None and record.tenant == tenant else None

    def begin_part(self, tenant: str, upload_id: str) -> "PartWriter":
        """Begin a part; without a commit, nothing remains."""
        record = self.get(tenant, upload_id)
        _check_pending(record)
        return PartWriter(self, record, new_id(PART, self._queue.now()))

    def complete(
        self,
        tenant: str,
        upload_id: str,
        part_ids: Sequence[str],
        check: Callable[[Upload], None],
        md5: str | None = None,
    ) -> UploadRecord:
        """Create a file of the parts, in this order; a repeated call returns the same file.

        `check` raises `ApiError` for a content that a file of its purpose may not have. An upload
        that was refused stays pending.
        """
        parts_sha256 = hashlib.sha256("\n".join(part_ids).encode()).hexdigest()
        with self.held(tenant, upload_id) as record:
            record = self._settled(record)
            if record.status == "completed" and record.parts_sha256 == parts_sha256:
                return record
            _check_pending(record)
            paths = self._paths(record, part_ids)
            return self._join(record, parts_sha256, paths, check, md5)

    def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        """End a pending upload without a file; change nothing in a cancelled one."""
        with self.held(tenant, upload_id) as record:
            record = self._settled(record)
            if record.status == "cancelled":
                return record
            _check_pending(record)
            record = self._changed(record, status="cancelled")
            self._remove_parts(record.id)
            return record

    def sweep(self, now: float, seconds: float = math.inf) -> int:
        """Remove parts of ended uploads, and uploads after a day, oldest first, for about
        `seconds`.

        Return the number of uploads with something to remove.
        """
        self._files.check()
        removed, deadline = 0, time.monotonic() + seconds
        for name in list_names(str(self._folder)):
            made = time_of(name) if is_id(UPLOAD, name) else None
            if made is None or now < made + _OPEN_SECONDS or time.monotonic() >= deadline:
                continue
            try:
                removed += self._sweep_one(name, now >= made + _KEPT_SECONDS)
            except Busy:
                continue
            except StoreError as error:
                logger.error("failed to clean up upload %s; retrying later: %s", name, error)
        return removed

    @contextlib.contextmanager
    def held(self, tenant: str, upload_id: str, *, alone: bool = True) -> Iterator[UploadRecord]:
        """Hold an upload against other changes, and, if `alone`, against added parts; yield its
        record.

        Raise `ApiError` 409 at once if another call holds it.
        """
        self.get(tenant, upload_id)
        try:
            with self._hold(str(self._folder / upload_id), alone):
                yield self.get(tenant, upload_id)
        except Busy:
            message = f"Another call is using the upload {upload_id}; try again in a moment."
            raise ApiError(409, message, param="upload_id", code="upload_busy") from None

    def _hold(self, folder: str, alone: bool = True) -> contextlib.AbstractContextManager[None]:
        """Hold the folder of an upload.

        In a bucket without a shared lock: parts added beside a completion are none that it names.
        """
        if is_local(folder):
            return (exclusive if alone else shared)(folder, 0, lock=_LOCK)
        return hold(self._queue, folder, 0) if alone else contextlib.nullcontext()

    def folder(self, upload_id: str) -> PurePath:
        """Return the folder of an upload."""
        return self._folder / upload_id

    def parts(self, upload_id: str) -> dict[str, int]:
        """Return the bytes of each complete part."""
        found = sizes_in(str(self._folder / upload_id))
        return {name: size for name, size in found.items() if is_id(PART, name)}

    def _paths(self, record: UploadRecord, part_ids: Sequence[str]) -> list[str]:
        """Return the files of the parts; check that each exists and is named once."""
        sizes = self.parts(record.id)
        for place, part_id in enumerate(part_ids):
            if part_id not in sizes:
                fields.fail(
                    f"No such part of the upload {record.id}: {fields.shown(part_id)}",
                    f"part_ids[{place}]",
                    "invalid_value",
                )
        if len(set(part_ids)) < len(part_ids):
            fields.fail("Invalid 'part_ids': a part is named twice.", "part_ids", "invalid_value")
        size = sum(sizes[part_id] for part_id in part_ids)
        if size != record.bytes:
            fields.fail(
                f"The parts have {size} bytes, and the upload was created for {record.bytes}.",
                "part_ids",
                "invalid_value",
            )
        return [str(self._folder / record.id / part_id) for part_id in part_ids]

    def _join(
        self,
        record: UploadRecord,
        parts_sha256: str,
        paths: list[str],
        check: Callable[[Upload], None],
        md5: str | None,
    ) -> UploadRecord:
        with self._files.begin(
            filename=record.filename,
            purpose=record.purpose,
            tenant=record.tenant,
            expires_seconds=record.file_expires_seconds,
        ) as upload:
            record = self._changed(record, file_id=upload.id, parts_sha256=parts_sha256)
            digest = hashlib.md5(usedforsecurity=False)
            for chunk in _content(paths):
                upload.write(chunk)
                if md5 is not None:
                    digest.update(chunk)
            if md5 is not None and digest.hexdigest() != md5.lower():
                fields.fail(f"The content has the md5 {digest.hexdigest()}, not that given.", "md5", "invalid_value")
            check(upload)
            return self._completed(record, upload.commit())

    def _settled(self, record: UploadRecord) -> UploadRecord:
        """Return the upload as completed if its file exists, after a completion was killed."""
        if record.status != "pending" or record.file_id is None:
            return record
        file = self._files.finish(record.file_id)
        return record if file is None else self._completed(record, file)

    def _completed(self, record: UploadRecord, file: FileRecord) -> UploadRecord:
        record = self._changed(record, status="completed", file=file)
        self._remove_parts(record.id)
        return record

    def _sweep_one(self, upload_id: str, wholly: bool) -> bool:
        folder = str(self._folder / upload_id)
        if not wholly and not set(list_names(folder)) - {_RECORD, _LOCK}:
            return False
        with self._hold(folder):
            record = self._read(upload_id)
            if record is not None:
                self._settled(record)
            self._remove_parts(upload_id)
            if wholly:
                remove_tree(folder)
        return True

    def _remove_parts(self, upload_id: str) -> None:
        """Remove the parts; the sweep retries failures."""
        folder = str(self._folder / upload_id)
        with contextlib.suppress(StoreError):
            for name in list_names(folder):
                if name not in (_RECORD, _LOCK):
                    delete(join(folder, name))

    def _changed(self, record: UploadRecord, **changes: Any) -> UploadRecord:
        """Change a record; the caller must hold its upload.

        Raise `StoreError`; in a bucket also if another process changed it since it was read.
        """
        changed = msgspec.structs.replace(record, **changes)
        known = record.__dict__["stored_version"]
        version = replace_version(self._location(record.id), msgspec.json.encode(changed), known)
        if version is None:
            raise StoreError(f"another call has changed the upload {record.id}: read it again")
        return _of_version(changed, version)

    def _location(self, upload_id: str) -> str:
        return str(self._folder / upload_id / _RECORD)

    def _read(self, upload_id: str) -> UploadRecord | None:
        """Return a record; None if it is missing from a mounted store."""
        record = self._record(upload_id)
        if record is None:
            self._files.check()
            record = self._record(upload_id)
        return record

    def _record(self, upload_id: str) -> UploadRecord | None:
        path = self._location(upload_id)
        try:
            found = read_version(path)
            return _of_version(_decode(found.data), found.version)
        except msgspec.DecodeError as error:
            logger.error("%s is not a valid upload record: %s", path, error)
        except StoreError as error:
            if not is_missing(error):
                raise
        return None


class PartWriter:
    """A part being uploaded.

    Not thread-safe. Methods raise `ApiError` and `StoreError`, and `StoreFull` for a full disk.
    """

    def __init__(self, store: UploadStore, upload: UploadRecord, part_id: str) -> None:
        self.id = part_id
        self.upload_id = upload.id
        self._store = store
        self._upload = upload
        self._path = store.folder(upload.id) / part_id
        with named("cannot write", str(self._path)):
            temporary = self._path.with_name(f".{part_id}.tmp")
            self._file = UnnamedFile(str(temporary if is_local(str(self._path)) else self._path))

    def write(self, data: bytes) -> None:
        """Append data."""
        with named("cannot write", str(self._path)):
            self._file.write(data)

    def commit(self) -> None:
        """Make the part durable, then add it to its upload, unless that has ended meanwhile."""
        with named("cannot write", str(self._path)):
            self._file.sync()
        with self._store.held(self._upload.tenant, self.upload_id, alone=False) as upload:
            _check_pending(upload)
            self._add(upload)
        with named("cannot write", str(self._path)):
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Remove uncommitted data."""
        self._file.close()

    def _add(self, upload: UploadRecord) -> None:
        """Add the part, and remove it again if there is no room.

        Parts that are added at once each count the others.
        """
        with named("cannot write", str(self._path)):
            self._file.commit(str(self._path))
        try:
            self._check_room(upload)
        except BaseException:
            delete(str(self._path))
            raise

    def _check_room(self, upload: UploadRecord) -> None:
        """Raise an error if the upload has too many parts or bytes.

        Parts may be sent again after a lost answer, but not without limit.
        """
        sizes = self._store.parts(upload.id)
        most = 2 * upload.bytes + PART_BYTES
        if len(sizes) > MOST_PARTS or sum(sizes.values()) > most:
            fields.fail(
                f"With this part the upload {upload.id} would have {len(sizes)} parts of {sum(sizes.values())} bytes;"
                f" it may have {MOST_PARTS} of {most}.",
                "data",
                "upload_full",
            )


def _of_version(record: UploadRecord, version: str) -> UploadRecord:
    record.__dict__["stored_version"] = version
    return record


def _check_pending(record: UploadRecord) -> None:
    """Raise `ApiError` for an upload that has ended."""
    status = record.status_at(time.time())
    if status != "pending":
        fields.fail(f"The upload {record.id} is {status}; create another one.", "upload_id", f"upload_{status}")


def _content(paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        with open_input(path) as file, named("cannot read", path):
            while chunk := file.read(_COPY_BYTES):
                yield chunk
