"""Locations of files: a local path or a URI that `pyarrow.fs` knows.

What is written here is either whole and on disk, or absent.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from jobs.errors import JobsError

_HASH_CHUNK = 1 << 20
_BUFFER = 1 << 18
_LOCK_POLL_SECONDS = 0.01


_COPY_BYTES = 1 << 20
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StoreError(JobsError):
    """A file cannot be read or written; the text is one sentence that names it."""

    status = 503
    retry = True


class StoreFull(StoreError):
    """There is no room for a file."""

    status = 507
    retry = False


def store_error(message: str, error: OSError) -> StoreError:
    """The error that a fault of the file system becomes."""
    return (StoreFull if error.errno in _NO_SPACE else StoreError)(f"{message}: {error.strerror or error}")


def local_path(location: str) -> Path | None:
    """The path behind a location, or None if it is not on this machine's file system."""
    path = _local(location)
    return None if path is None else Path(path)


def _local(location: str) -> str | None:
    """The same as text: a `Path` takes longer to make than some of its uses."""
    if location.startswith("file://"):
        return unquote(urlsplit(location).path)
    return None if "://" in location else location


def absolute(location: str) -> str:
    """The same place for processes with other working directories."""
    return location if "://" in location else os.path.abspath(location)


def join(root: str, *names: str) -> str:
    """A location below `root`."""
    return "/".join([root.rstrip("/"), *names])


def open_input(location: str, buffered: bool = True) -> BinaryIO:
    """A seekable reader. Raises `StoreError`."""
    path = _local(location)
    with named("cannot read", location):
        if path is not None:
            return open(path, "rb", buffering=_BUFFER if buffered else 0)
        filesystem, inside = _remote(location)
        file = filesystem.open_input_file(inside)
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER) if buffered else file)


def size_of(location: str) -> int | None:
    """Bytes of a file, or None if there is none. Raises `StoreError`."""
    stamp = stamp_of(location)
    return None if stamp is None else stamp[0]


def stamp_of(location: str) -> tuple[int, int] | None:
    """Bytes and time of the last change (ns; 0 if the store knows none) of a file, or None if there
    is none. Raises `StoreError`.
    """
    path = _local(location)
    with named("cannot read", location):
        if path is None:
            filesystem, inside = _remote(location)
            info = filesystem.get_file_info(inside)
            return (int(info.size), int(info.mtime_ns or 0)) if info.is_file else None
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def read_bytes(location: str) -> bytes:
    """The whole of a small file. Raises `StoreError`."""
    with open_input(location) as file, named("cannot read", location):
        return file.read()


def sha256_of(location: str, check: Callable[[], object] = int) -> str:
    """The hash of a file's bytes; calls `check` often. Raises `StoreError`."""
    digest = hashlib.sha256()
    with open_input(location) as file, named("cannot read", location):
        while chunk := file.read(_HASH_CHUNK):
            check()
            digest.update(chunk)
    return digest.hexdigest()


def make_folder(location: str) -> None:
    """Make a folder and those above it, durably. Raise `StoreError`."""
    with named("cannot make the folder", location):
        path = local_path(location)
        if path is not None:
            _make_folder(path)
        else:
            filesystem, inside = _remote(location)
            filesystem.create_dir(inside, recursive=True)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def list_names(location: str) -> list[str]:
    """Names of the files and folders in a folder, sorted; empty if there is no such folder.

    Raises `StoreError`.
    """
    path = _local(location)
    with named("cannot list", location):
        if path is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return sorted(os.listdir(path))
            return []
        from pyarrow.fs import FileSelector

        filesystem, inside = _remote(location)
        return sorted(info.base_name for info in filesystem.get_file_info(FileSelector(inside, allow_not_found=True)))


def delete(location: str) -> None:
    """Remove a file that may be gone already. Raise `StoreError`."""
    path = _local(location)
    with named("cannot remove", location):
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        elif size_of(location) is not None:
            filesystem, inside = _remote(location)
            filesystem.delete_file(inside)


class AtomicWriter:
    """Writes a file that appears under its name only when `commit` has put all of it on disk;
    `close` without it leaves nothing.

    `sha256` and `bytes` describe what was written. `scratch` is a folder to write in until then,
    used if it is beside the file. Raises `StoreError`, also for a full disk.
    """

    def __init__(self, location: str, scratch: str | None = None) -> None:
        self.location = location
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._path = _local(location)
        self._open = True
        with named("cannot write", location):
            if self._path is not None:
                folder, name = os.path.split(self._path)
                self._folder = folder or "."
                folder = _scratch_for(self._folder, scratch)
                self._temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
                # Closed by `commit` or `close`.
                self._file: Any = open(self._temporary, "wb", buffering=_BUFFER)  # noqa: SIM115
            else:
                self._filesystem, self._inside = _remote(location)
                folder, _, name = self._inside.rpartition("/")
                self._remote_temporary = f"{folder}/.{name}.{secrets.token_hex(6)}.tmp"
                self._file = self._filesystem.open_output_stream(self._remote_temporary)

    @property
    def sha256(self) -> str:
        """Hash of the bytes written so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        """Appends; returns the number of bytes, as files do."""
        try:  # without `named`, which takes longer than to write a line
            self._file.write(data)
        except OSError as error:
            raise store_error(f"cannot write {self.location}", error) from error
        self._digest.update(data)
        self.bytes += len(data)
        return len(data)

    def commit(self) -> None:
        """Make the file durable, then visible."""
        with named("cannot write", self.location):
            if self._path is None:
                self._file.close()
                self._filesystem.move(self._remote_temporary, self._inside)
            else:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._path)
                sync_folder(self._folder)
        self._open = False

    def close(self) -> None:
        """Drop what was not committed."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._file.close()  # a remote stream publishes what it has, under the temporary name
        with contextlib.suppress(OSError):
            if self._path is not None:
                os.unlink(self._temporary)
            else:
                self._filesystem.delete_file(self._remote_temporary)

    def __enter__(self) -> "AtomicWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write_bytes(location: str, data: bytes) -> None:
    """Write or replace a small file. Raise `StoreError`."""
    with AtomicWriter(location) as writer:
        writer.write(data)
        writer.commit()


def append_behind(location: str, size: int, data: bytes, durable: bool = True) -> None:
    """Put data behind the first `size` bytes of a local file; what was behind them goes.

    Raise `StoreError`, also where the file is shorter.
    """
    path = local_path(location)
    assert path is not None, "a batch's root is local"
    with named("cannot write", location):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "r+b") as file:
            if os.fstat(handle).st_size < size:
                raise StoreError(f"{location} is shorter than was noted")
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        if durable and size == 0:
            sync_folder(path.parent)


def link(source: str, location: str) -> None:
    """Give a local file a second name, or make a copy where the file system has none.

    Raise `FileNotFoundError` where there is no source, and `StoreError`.
    """
    try:
        os.link(source, location)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise store_error(f"cannot write {location}", error) from error
        with open_input(source) as file, AtomicWriter(location) as writer:
            while data := file.read(_COPY_BYTES):
                writer.write(data)
            writer.commit()


def sync_folder(path: str | Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Busy(JobsError):
    """Another process holds the folder."""

    retry = True


def exclusive(root: str, patience: float, lock: str = ".lock") -> contextlib.AbstractContextManager[None]:
    """Hold a folder against every other process on this file system, stopped ones included; the
    kernel lets go when the holder dies.

    Raise `Busy` after `patience` seconds, and `StoreError`: always for a remote folder, which has
    no such lock.
    """
    return _held(root, patience, lock, fcntl.LOCK_EX)


def shared(root: str, patience: float, lock: str = ".lock") -> contextlib.AbstractContextManager[None]:
    """Hold a folder beside others that share it, as `exclusive` does against those that do not."""
    return _held(root, patience, lock, fcntl.LOCK_SH)


@contextlib.contextmanager
def _held(root: str, patience: float, lock: str, kind: int) -> Iterator[None]:
    path = _local(root)
    if path is None:
        raise StoreError(f"{root} is remote: a batch's folder must be on a file system that has locks")
    with named("cannot write to", root):
        handle = os.open(os.path.join(path, lock), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(handle, kind, root, time.monotonic() + patience)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, kind: int, root: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Busy(f"{root} is in use by another process") from None
        time.sleep(_LOCK_POLL_SECONDS)


def sweep(root: str) -> None:
    """Remove what killed writers left half written; only for the holder of `exclusive`."""
    for name in list_names(root):
        if name.startswith(".") and name.endswith(".tmp"):
            delete(join(root, name))


def sweep_beside(location: str) -> None:
    """Remove what killed writers of one file left in its folder; only for the one process that may
    write it.
    """
    folder, _, name = location.rpartition("/")
    half_written = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]+\.tmp")
    for found in list_names(folder or "/"):
        if half_written.fullmatch(found):
            delete(join(folder, found))


def _scratch_for(folder: str, scratch: str | None) -> str:
    """`scratch` if it is a folder in `folder` from which files can be renamed, else `folder`."""
    found = None if scratch is None else _local(scratch)
    if found is None or os.path.dirname(found) != folder or os.stat(found).st_dev != os.stat(folder).st_dev:
        return folder
    return found


@contextlib.contextmanager
def named(what: str, location: str) -> Iterator[None]:
    """Turn errors of the file system into `StoreError`."""
    try:
        yield
    except OSError as error:
        raise store_error(f"{what} {location}", error) from error


def _remote(location: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    filesystem, inside = FileSystem.from_uri(location)
    return filesystem, inside
