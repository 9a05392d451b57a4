"""Idempotency keys: a repeated request gets the answer of the first request with its key.

Each key has a file, to which lines are appended: the id to be created, then the answer. The
creating process holds a lock on that file, which the kernel releases if it dies. So only one
process creates at a time, and the next one after a killed one first looks for the object that was
begun. A refusal frees the key, so that a corrected request can use it; if the process was killed
before that, no client got the refusal, and the same request is repeated.

In a bucket, the creating process has a lease, which may expire while it works. The next one first
ensures that the begun object never appears, or finds it (`find`).

The files are in the file store: like the created objects they outlive an empty Redis.
"""

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jobs.protocol.idempotency import HEADER
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue, QueueFull, QueueUnavailable
from jobs.store.file_store import FileStore
from jobs.store.leases import hold
from jobs.store.marker import IDEMPOTENCY_FOLDER
from jobs.store.storage import (
    Busy,
    StoreError,
    StoreFull,
    delete,
    is_local,
    is_missing,
    make_folder,
    named,
    read_version,
    stamp_of,
    stamps_in,
    sync_folder,
    write_version,
)

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 24 * 3600
_FREE = b"free "  # prefix of a stored key in a bucket that may be used again
_REFUSALS = (ApiError, QueueFull, StoreFull)
_SWEPT_SECONDS = _KEPT_SECONDS + 3600  # by the file's time, from another clock


class FirstRequest(msgspec.Struct, frozen=True):
    """A line of a key's file; the last line counts."""

    came_at: float  # unix seconds by the clock of Redis
    digest: str  # of its body
    made: str  # id of the object being created
    answer: dict[str, Any] | None = None  # set once it is created


_decode = msgspec.json.Decoder(FirstRequest).decode


class IdempotencyKeys:
    """The keys of all tenants. Synchronous and thread-safe.

    Methods raise `StoreError` and `QueueUnavailable`.
    """

    def __init__(self, queue: Queue, files: FileStore) -> None:
        self._queue = queue
        self._files = files
        self._folder = files.root / IDEMPOTENCY_FOLDER
        self._unswept: Iterator[os.DirEntry[str]] | None = None  # entries left over by the last sweep

    def hold(self, tenant: str, kind: str, key: str) -> "HeldKey":
        """Hold a tenant's key for a kind of object. Raise `ApiError` 409 while another call holds
        it.
        """
        self._files.check()
        make_folder(str(self._folder))
        name = hashlib.sha256("\0".join((tenant, kind, key)).encode()).hexdigest()
        if not is_local(str(self._folder)):
            return LeasedKey(self._queue, str(self._folder / name))
        held = None
        while held is None:
            held = HeldKey.take(Path(self._folder / name), self._queue.now())
        return held

    def sweep(self, now: float, seconds: float = math.inf) -> int:
        """Remove expired keys for about `seconds`; the next call resumes there.

        Return the number removed. A key that cannot be removed delays no others. For one thread at
        a time.
        """
        self._files.check()
        if not is_local(str(self._folder)):
            return self._sweep_bucket(now, seconds)
        removed, deadline = 0, time.monotonic() + seconds
        entries, self._unswept = self._unswept or self._entries(), None
        for entry in entries:
            removed += _sweep_one(entry, now)
            if time.monotonic() >= deadline:
                self._unswept = entries
                break
        return removed

    def _sweep_bucket(self, now: float, seconds: float) -> int:
        removed, deadline = 0, time.monotonic() + seconds
        for name, stamp in stamps_in(str(self._folder)).items():
            if now < stamp[1] / 1e9 + _SWEPT_SECONDS or time.monotonic() >= deadline:
                continue
            removed += self._sweep_object(str(self._folder / name), stamp)
        return removed

    def _sweep_object(self, location: str, stamp: tuple[int, int]) -> bool:
        try:
            with contextlib.suppress(Busy), hold(self._queue, location, 0):
                if stamp_of(location) == stamp:  # check again now that no call can change it
                    delete(location)
                    return True
        except StoreError as error:
            logger.error("failed to remove the idempotency key %s; retrying later: %s", location, error)
        return False

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        folder = self._folder
        with named("cannot list", str(folder)), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            yield from entries


class HeldKey:
    """A key that this call holds until `close`. Methods raise `StoreError`."""

    def __init__(self, path: Path, file: Any, now: float) -> None:
        self.now = now
        self._path = path
        self._file = file
        self.first = self._read()
        if self.first is not None and now >= self.first.came_at + _KEPT_SECONDS:
            self._file.truncate(0)
            self.first = None

    @classmethod
    def take(cls, path: Path, now: float) -> "HeldKey | None":
        """Return a key; None if its file was just removed. Raise `ApiError` 409."""
        with named("cannot write", str(path)), contextlib.ExitStack() as closing:
            file = closing.enter_context(open(path, "ab+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use() from None
            if os.fstat(file.fileno()).st_nlink == 0:
                return None
            held = cls(path, file, now)
            closing.pop_all()
        return held

    def make_once(
        self,
        digest: str,
        new_id: str,
        find: Callable[[str], dict[str, Any] | None],
        make: Callable[[str], dict[str, Any]],
    ) -> tuple[dict[str, Any], bool]:
        """Return the first request's answer, and whether that was an earlier request.

        `make` creates the object with the given id. `find` returns the answer for an id that was
        begun, or None if no object came of it. If `make` refuses without creating anything, the key
        is freed. Raise `ApiError` 422 if the body's digest differs from the first request's.
        """
        first = self.first
        if first is not None and first.digest != digest:
            message = f"This {HEADER} was used for another request; take a new one for each."
            raise ApiError(422, message, param=HEADER, code="idempotency_key_reused")
        if first is not None and first.answer is not None:
            return first.answer, True
        answer = None if first is None else find(first.made)
        if first is None or answer is None:
            first = FirstRequest(self.now, digest, new_id)
            self._append(first)
            try:
                made = make(new_id)
            except _REFUSALS:
                self._free_unless(new_id, find)
                raise
            self._note_answer(first, made)
            return made, False
        self._note_answer(first, answer)
        return answer, True

    def close(self) -> None:
        """Release the key, and remove its file if nothing was begun."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if self.first is None:
                self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._file.close()

    def _free_unless(self, made: str, find: Callable[[str], dict[str, Any] | None]) -> None:
        """Clear the file, unless the refused call did create the object, or that is unknown."""
        with contextlib.suppress(ApiError, QueueUnavailable, StoreError, OSError):
            if find(made) is None:
                self._free()
                self.first = None

    def _free(self) -> None:
        self._file.truncate(0)
        os.fsync(self._file.fileno())

    def _note_answer(self, first: FirstRequest, answer: dict[str, Any]) -> None:
        """Append the answer, if there is room: otherwise `find` can return it later."""
        try:
            self._append(msgspec.structs.replace(first, answer=answer))
        except StoreError as error:
            logger.warning("failed to store the answer of the request that created %s: %s", first.made, error)

    def _append(self, first: FirstRequest) -> None:
        with named("cannot write", str(self._path)):
            self._file.write(msgspec.json.encode(first) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            if first.answer is None:
                sync_folder(self._path.parent)
        self.first = first

    def _read(self) -> FirstRequest | None:
        """Return the last line; remove a line that a kill cut off."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self._file.truncate(len(whole))
        try:
            return _decode(whole.splitlines()[-1]) if whole else None
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._path} is no record of an {HEADER} ({error}); remove it") from error

    def __enter__(self) -> "HeldKey":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LeasedKey(HeldKey):
    """A key in a bucket."""

    def __init__(self, queue: Queue, location: str) -> None:
        """Hold the key. Raise `ApiError` 409."""
        self.now = queue.now()
        self.first = None
        self._location = location
        self._version: str | None = None
        self._lease = contextlib.ExitStack()
        try:
            self._lease.enter_context(hold(queue, location, 0))
        except Busy:
            raise _in_use() from None
        with contextlib.ExitStack() as closing:
            closing.callback(self.close)
            self._load()
            closing.pop_all()

    def close(self) -> None:
        """Release the key."""
        self._lease.close()

    def _load(self) -> None:
        try:
            data, self._version = read_version(self._location)
        except StoreError as error:
            if not is_missing(error):
                raise
            return
        if data.startswith(_FREE):
            return
        try:
            found = _decode(data)
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._location} is no record of an {HEADER} ({error}); remove it") from error
        self.first = found if self.now < found.came_at + _KEPT_SECONDS else None

    def _append(self, first: FirstRequest) -> None:
        self._put(msgspec.json.encode(first))
        self.first = first

    def _free(self) -> None:
        self._put(_FREE + secrets.token_hex(8).encode())

    def _put(self, data: bytes) -> None:
        version = write_version(self._location, data, self._version)
        if version is None:
            raise StoreError(f"another request with this {HEADER} came in between: send it again")
        self._version = version


def _in_use() -> ApiError:
    message = f"The first request with this {HEADER} is still running; try again in a moment."
    return ApiError(409, message, param=HEADER, code="idempotency_key_in_use")


def _sweep_one(entry: os.DirEntry[str], now: float) -> bool:
    try:
        return _is_over(entry.stat(), now) and _remove_if_free(entry.path, now)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.error("failed to remove the idempotency key %s; retrying later: %s", entry.path, error)
        return False


def _is_over(status: os.stat_result, now: float) -> bool:
    return now >= status.st_mtime + _SWEPT_SECONDS


def _remove_if_free(path: str, now: float) -> bool:
    # An exclusive lock on NFS requires a file opened for writing.
    with open(path, "rb+") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(file.fileno())  # check again now that no call can change it
        if status.st_nlink and _is_over(status, now):
            os.unlink(path)
            return True
    return False
