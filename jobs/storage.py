"""Where files stand: a local path or a URI that `pyarrow.fs` knows. What is written here is either whole and on disk, or absent."""

import contextlib
import fcntl
import hashlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

_HASH_CHUNK = 1 << 20
_BUFFER = 1 << 18
_LOCK_POLL_SECONDS = 0.01


class StoreError(Exception):
    """A file cannot be read or written; the text is one sentence that names it."""


def local_path(location: str) -> Path | None:
    """The path behind a location, or None if it is not on this machine's file system."""
    if location.startswith("file://"):
        return Path(unquote(urlsplit(location).path))
    return None if "://" in location else Path(location)


def absolute(location: str) -> str:
    """The same place for processes with other working directories."""
    return location if "://" in location else os.path.abspath(location)


def join(root: str, *names: str) -> str:
    """A location below `root`."""
    return "/".join([root.rstrip("/"), *names])


def open_input(location: str) -> BinaryIO:
    """A seekable, buffered reader. Raises `StoreError`."""
    path = local_path(location)
    try:
        if path is not None:
            return open(path, "rb", buffering=_BUFFER)
        filesystem, inside = _remote(location)
        return cast(BinaryIO, io.BufferedReader(filesystem.open_input_file(inside), _BUFFER))
    except OSError as error:
        raise StoreError(f"cannot read {location}: {_reason(error)}") from error


def size_of(location: str) -> int | None:
    """Bytes of a file, or None if there is none."""
    path = local_path(location)
    if path is not None:
        return path.stat().st_size if path.is_file() else None
    filesystem, inside = _remote(location)
    info = filesystem.get_file_info(inside)
    return int(info.size) if info.is_file else None


def stamp_of(location: str) -> tuple[int, int] | None:
    """Bytes and time of the last change (ns; 0 if the store knows none) of a file, or None if there is none."""
    path = local_path(location)
    if path is not None:
        if not path.is_file():
            return None
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    filesystem, inside = _remote(location)
    info = filesystem.get_file_info(inside)
    return (int(info.size), int(info.mtime_ns or 0)) if info.is_file else None


def read_bytes(location: str) -> bytes:
    """The whole of a small file. Raises `StoreError`."""
    with open_input(location) as file:
        return file.read()


def sha256_of(location: str) -> str:
    """The hash of a file's bytes. Raises `StoreError`."""
    digest = hashlib.sha256()
    with open_input(location) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def make_folder(location: str) -> None:
    """Makes a folder and those above it. Raises `StoreError`."""
    try:
        path = local_path(location)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            filesystem, inside = _remote(location)
            filesystem.create_dir(inside, recursive=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {location}: {_reason(error)}") from error


def list_names(location: str) -> list[str]:
    """Names of the files and folders in a folder, sorted; empty if there is no such folder."""
    path = local_path(location)
    if path is not None:
        return sorted(os.listdir(path)) if path.is_dir() else []
    from pyarrow.fs import FileSelector

    filesystem, inside = _remote(location)
    return sorted(info.base_name for info in filesystem.get_file_info(FileSelector(inside, allow_not_found=True)))


def delete(location: str) -> None:
    """Removes a file that may be gone already."""
    path = local_path(location)
    if path is not None:
        path.unlink(missing_ok=True)
    elif size_of(location) is not None:
        filesystem, inside = _remote(location)
        filesystem.delete_file(inside)


class AtomicWriter:
    """Writes a file that appears under its name only when `commit` has put all of it on disk; `close` without it leaves nothing.

    `sha256` and `bytes` describe what was written. Raises `StoreError`, also for a full disk.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._path = local_path(location)
        self._open = True
        try:
            if self._path is not None:
                self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
                self._file: Any = open(self._temporary, "wb", buffering=_BUFFER)  # noqa: SIM115 - closed by `commit` or `close`
            else:
                filesystem, inside = _remote(location)
                self._file = filesystem.open_output_stream(inside)
        except OSError as error:
            raise StoreError(f"cannot write {location}: {_reason(error)}") from error

    @property
    def sha256(self) -> str:
        """Hash of the bytes written so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        """Appends; returns the number of bytes, as files do."""
        try:
            self._file.write(data)
        except OSError as error:
            raise StoreError(f"cannot write {self.location}: {_reason(error)}") from error
        self._digest.update(data)
        self.bytes += len(data)
        return len(data)

    def commit(self) -> None:
        """Makes the file durable, then visible."""
        try:
            if self._path is None:
                self._file.close()
            else:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._path)
                sync_folder(self._path.parent)
        except OSError as error:
            raise StoreError(f"cannot write {self.location}: {_reason(error)}") from error
        self._open = False

    def close(self) -> None:
        """Drops what was not committed."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._file.close()
        if self._path is not None:
            self._temporary.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                delete(self.location)

    def __enter__(self) -> "AtomicWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def write_bytes(location: str, data: bytes) -> None:
    """Writes or replaces a small file. Raises `StoreError`."""
    with AtomicWriter(location) as writer:
        writer.write(data)
        writer.commit()


def sync_folder(path: Path) -> None:
    """Makes a rename in the folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Busy(Exception):
    """Another process holds the folder."""


@contextlib.contextmanager
def exclusive(root: str, patience: float) -> Iterator[None]:
    """Holds a folder against every other process on this file system, stopped ones included; the kernel lets go when the holder dies.

    Raises `Busy` after `patience` seconds. A remote folder has no such lock: there the record's generation in Redis stands alone.
    """
    path = local_path(root)
    if path is None:
        yield
        return
    try:
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"cannot write to {root}: {_reason(error)}") from error
    try:
        _lock(handle, root, time.monotonic() + patience)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, root: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Busy(f"{root} is in use by another process") from None
        time.sleep(_LOCK_POLL_SECONDS)


def sweep(root: str) -> None:
    """Removes what killed writers left half written; only for the holder of `exclusive`."""
    for name in list_names(root):
        if name.startswith(".") and name.endswith(".tmp"):
            delete(join(root, name))


def _remote(location: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    filesystem, inside = FileSystem.from_uri(location)
    return filesystem, inside


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
