"""Access to files by location: a local path, or the URI of an object.

A written file is either complete and durable, or absent.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from jobs.errors import JobsError
from jobs.store.block_cache import ObjectReader
from jobs.store.local_storage import LocalReader, LocalStorage
from jobs.store.object_storage import open_bucket

_HASH_CHUNK = 1 << 20
_COPY_BYTES = 1 << 20
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOCAL = LocalStorage()

logger = logging.getLogger(__name__)


class FolderStamp(NamedTuple):
    """A stamp of a folder that changes when an entry is added or removed."""

    value: int
    changed_ns: int  # unix; 0 if it cannot change again without a new value


class StorageWriter(Protocol):
    """A file being written. Methods raise OSError."""

    file: Any
    """Accepts the bytes."""

    def write(self, data: bytes) -> int: ...

    def sync(self) -> None:
        """Make the written data durable, without a name yet."""

    def commit(self, path: str) -> None:
        """Give the file its name, which is durable once the folder is synced."""

    def close(self) -> None:
        """Discard uncommitted data."""


class RandomReader(Protocol):
    """Reads at any offset of a file, also after its removal. Thread-safe."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end. Raise `StoreError`."""

    def close(self) -> None: ...


class Storage(Protocol):
    """The operations that a file store needs of its storage. Methods raise OSError."""

    def open(self, path: str, buffered: bool = True, unchanging: bool = False) -> BinaryIO:
        """Return a seekable reader of one version of a file."""

    def open_at(self, path: str, unchanging: bool = False) -> "RandomReader":
        """Return a reader of one version of a file."""

    def read(self, path: str) -> bytes: ...

    def stamp(self, path: str) -> tuple[int, int] | None:
        """Return bytes and time of the last change, ns; None if there is no file."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, in any order; empty if there is no folder."""

    def stamps(self, folder: str) -> dict[str, tuple[int, int]]:
        """Return the stamp of each file in a folder."""

    def folder_stamp(self, folder: str) -> tuple[int, int] | None:
        """Return the values of a `FolderStamp`; None if there is no folder."""

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, durably."""

    def add_folder(self, path: str) -> None:
        """Create a folder durably in an existing one."""

    def begin_folder(self, path: str) -> None:
        """Create a folder that must not exist."""

    def keep_folder(self, path: str) -> None:
        """Create a folder like `make_folder`; it also exists while it is empty."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

    def touch(self, path: str) -> None:
        """Create an empty file durably, or leave the existing one."""

    def read_version(self, path: str) -> tuple[bytes, str]:
        """Return a file's content and version."""

    def replace_version(self, path: str, data: bytes, version: str) -> str | None:
        """Replace that version of a file durably, and return the new version."""

    def put_new(self, path: str, data: bytes) -> str | None:
        """Write a new file durably, and return its version; None if the file exists."""

    def writer(self, path: str, scratch: str | None = None, unchanging: bool = False) -> StorageWriter:
        """Begin a file, in `scratch` if it can be renamed from there."""

    def unnamed_writer(self, temporary: str) -> StorageWriter:
        """Begin a file under a temporary name."""

    def link(self, source: str, path: str) -> bool:
        """Give a file a second name, or copy it; return False if it must be written again."""

    def delete(self, path: str) -> None:
        """Remove a file that may be gone already."""

    def clear_folder(self, path: str, first: str, durably: bool) -> None:
        """Remove a folder of files, `first` before the others. Other processes may do so too."""

    def remove_tree(self, path: str) -> None:
        """Remove as much as possible of a folder and its subfolders. A bucket raises OSError."""


class StoreError(JobsError):
    """A file cannot be read or written; the text is one sentence that names it."""

    status = 503
    retry = True


class StoreFull(StoreError):
    """There is no room for a file."""

    status = 507
    retry = False


def store_error(message: str, error: OSError) -> StoreError:
    """Return the error for a fault of the file system."""
    return (StoreFull if error.errno in _NO_SPACE else StoreError)(f"{message}: {error.strerror or error}")


def is_missing(error: StoreError) -> bool:
    """Return whether the file is missing, as opposed to a fault of the file system."""
    return isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)


def is_local(location: str) -> bool:
    """Return whether a location is on this machine's file system."""
    return _local(location) is not None


def local_path(location: str) -> Path | None:
    """Return the path of a location, or None if it is not on this machine's file system."""
    path = _local(location)
    return None if path is None else Path(path)


def _local(location: str) -> str | None:
    """Return the same as text, since a `Path` is slow to create."""
    if location.startswith("file://"):
        return unquote(urlsplit(location).path)
    return None if "://" in location else location


def absolute(location: str) -> str:
    """Return the location independent of the working directory."""
    return location if "://" in location else os.path.abspath(location)


def new_name(location: str, name: str) -> str:
    """Return the name for a new file, unique in a bucket, where two processes may write at once.

    In a folder, which is held, it is `name` itself.
    """
    return name if is_local(location) else f"{name}-{secrets.token_hex(4)}"


class ObjectPath(PurePosixPath):
    """The path of an object, including the scheme of its URI."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def path_of(location: str) -> PurePath:
    """Return a location as a path, absolute on this machine, to build others below it."""
    path = local_path(location)
    return ObjectPath(location) if path is None else path.absolute()


def join(root: str, *names: str) -> str:
    """Return a location below `root`."""
    return "/".join([root.rstrip("/"), *names])


def open_input(location: str, buffered: bool = True, unchanging: bool = False) -> BinaryIO:
    """Return a seekable reader; reads of an object raise `StoreError`, too.

    An `unchanging` file never changes under its name, so that a bucket is read only once. Raise
    `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot read", location):
        file = storage.open(path, buffered, unchanging)
    _name_faults(getattr(file, "raw", file), location)
    return file


def open_at(location: str) -> RandomReader:
    """Return a random reader of a file that never changes under its name.

    Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot read", location):
        reader = storage.open_at(path, unchanging=True)
    _name_faults(reader, location)
    return reader


def _name_faults(reader: object, location: str) -> None:
    if isinstance(reader, ObjectReader | LocalReader):
        reader.fault = partial(store_error, f"cannot read {location}")


def size_of(location: str) -> int | None:
    """Return the bytes of a file, or None if there is none. Raise `StoreError`."""
    stamp = stamp_of(location)
    return None if stamp is None else stamp[0]


def stamp_of(location: str) -> tuple[int, int] | None:
    """Return bytes and time of the last change of a file, or None if there is none.

    The time is in ns, 0 if the store has none. Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot read", location):
        return storage.stamp(path)


def exists(location: str) -> bool:
    """Return whether there is a file or a folder. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot read", location):
        return storage.exists(path)


def read_bytes(location: str) -> bytes:
    """Return the whole of a small file. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot read", location):
        return storage.read(path)


def sha256_of(location: str, check: Callable[[], object] = int) -> str:
    """Return the hash of a file's bytes; calls `check` often. Raise `StoreError`."""
    digest = hashlib.sha256()
    with open_input(location) as file, named("cannot read", location):
        while chunk := file.read(_HASH_CHUNK):
            check()
            digest.update(chunk)
    return digest.hexdigest()


def make_folder(location: str) -> None:
    """Create a folder and its parents, durably. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot make the folder", location):
        storage.make_folder(path)


def keep_folder(location: str) -> None:
    """Create a folder durably; it remains when it becomes empty. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot make the folder", location):
        storage.keep_folder(path)


def folder_stamp_of(location: str) -> FolderStamp | None:
    """Return the stamp of a folder, None if there is none. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot read", location):
        stamp = storage.folder_stamp(path)
    return None if stamp is None else FolderStamp(*stamp)


def add_folder(location: str) -> None:
    """Create a folder durably in an existing one. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot make the folder", location):
        storage.add_folder(path)


def begin_folder(location: str) -> None:
    """Create a folder that must not exist, and its parent if needed.

    It is durable once the parent is synced. Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot make the folder", location):
        storage.make_folder(_folder_of(path))
        storage.begin_folder(path)


def list_names(location: str) -> list[str]:
    """Return names of the files and folders in a folder, sorted; empty if there is no such folder.

    Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot list", location):
        return sorted(storage.names(path))


def sizes_in(location: str) -> dict[str, int]:
    """Return the bytes of each file in an existing folder. Raise `StoreError`."""
    return {name: size for name, (size, _) in stamps_in(location).items()}


def stamps_in(location: str) -> dict[str, tuple[int, int]]:
    """Return the `stamp_of` each file in an existing folder. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot list", location):
        return storage.stamps(path)


def delete(location: str) -> None:
    """Remove a file that may be gone already. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot remove", location):
        storage.delete(path)


def clear_folder(location: str, first: str, durably: bool = True) -> None:
    """Remove a folder of files, `first` before the others. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot remove", location):
        storage.clear_folder(path, first, durably)


def remove_tree(location: str) -> None:
    """Remove as much as possible of a folder and its subfolders; log a bucket's refusal."""
    storage, path = _at(location)
    try:
        storage.remove_tree(path)
    except OSError as error:
        logger.warning("failed to remove %s: %s", location, error.strerror or error)


class UnnamedFile:
    """A new file that is `temporary` until it gets its name. Methods raise OSError."""

    def __init__(self, temporary: str) -> None:
        storage, path = _at(temporary)
        self._writer = storage.unnamed_writer(path)
        self.write, self.sync, self.close = self._writer.write, self._writer.sync, self._writer.close

    def commit(self, location: str) -> None:
        """Give the file its name, which is durable once its folder is synced; an object has its
        own.
        """
        self._writer.commit(_at(location)[1])


class AtomicWriter:
    """Writes a file that appears under its name once `commit` has put all of it on disk.

    `close` without `commit` leaves nothing. `sha256` and `bytes` describe the written data.
    `scratch` is a folder to write in until then, used if it is beside the file. For an `unchanging`
    file in a bucket, a local copy is cached. Raise `StoreError`, also for a full disk.
    """

    def __init__(self, location: str, scratch: str | None = None, unchanging: bool = False) -> None:
        self.location = location
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._storage, self._path = _at(location)
        with named("cannot write", location):
            self._writer = self._storage.writer(self._path, None if scratch is None else _local(scratch), unchanging)
        self._file = self._writer.file

    @property
    def sha256(self) -> str:
        """Return the hash of the bytes written so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        """Append, and return the number of bytes, like a file."""
        try:  # without `named`, which is slower than writing a line
            self._file.write(data)
        except OSError as error:
            raise store_error(f"cannot write {self.location}", error) from error
        self._digest.update(data)
        self.bytes += len(data)
        return len(data)

    def commit(self) -> None:
        """Make the file durable, then visible."""
        with named("cannot write", self.location):
            self._writer.sync()
            self._writer.commit(self._path)
            self._storage.sync_folder(_folder_of(self._path))

    def close(self) -> None:
        """Discard uncommitted data."""
        self._writer.close()

    def __enter__(self) -> "AtomicWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write_bytes(location: str, data: bytes, unchanging: bool = False) -> None:
    """Write or replace a small file. Raise `StoreError`."""
    with AtomicWriter(location, unchanging=unchanging) as writer:
        writer.write(data)
        writer.commit()


class Stored(NamedTuple):
    """The content and version of a small file; the version is "" where files have none."""

    data: bytes
    version: str


def read_version(location: str) -> Stored:
    """Return the whole of a small file and its version. Raise `StoreError`."""
    storage, path = _at(location)
    with named("cannot read", location):
        return Stored(*storage.read_version(path))


def replace_version(location: str, data: bytes, version: str) -> str | None:
    """Replace that version of a file durably; return the new one, or None if the file has changed.

    Local files have no versions: the caller must hold their folder. `data` must differ from all
    earlier contents: a bucket may give equal contents equal versions. Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot write", location):
        return storage.replace_version(path, data, version)


def write_new(location: str, data: bytes) -> str | None:
    """Write a small file durably unless it exists: among several processes the first one writes it.

    Return its version, or None. Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot write", location):
        return storage.put_new(path, data)


def write_version(location: str, data: bytes, version: str | None) -> str | None:
    """Replace that version of a small file, or with None write a new one.

    Return and raise like `replace_version` and `write_new`.
    """
    return write_new(location, data) if version is None else replace_version(location, data, version)


def touch(location: str) -> None:
    """Create an empty file durably, also on a full disk; leave an existing one.

    Raise `StoreError`.
    """
    storage, path = _at(location)
    with named("cannot write", location):
        storage.touch(path)


def append_behind(location: str, size: int, data: bytes, durable: bool = True) -> None:
    """Write data after the first `size` bytes of a local file, and cut off the rest.

    Raise `StoreError`, also if the file is shorter.
    """
    path = local_path(location)
    assert path is not None, "a batch's root is local"
    with named("cannot write", location):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "r+b") as file:
            if os.fstat(handle).st_size < size:
                raise StoreError(f"{location} is shorter than recorded")
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        if durable and size == 0:
            sync_folder(str(path.parent))


def link(source: str, location: str) -> None:
    """Give a file a second name, or copy it if the file system has no hard links.

    Raise `StoreError`, also if there is no source (`is_missing`).
    """
    (storage, path), (found, inside) = _at(location), _at(source)
    try:
        is_linked = found is storage and storage.link(inside, path)
    except FileNotFoundError as error:
        raise store_error(f"cannot link {source} to {location}", error) from error
    except OSError as error:
        raise store_error(f"cannot write {location}", error) from error
    if not is_linked:
        with open_input(source) as file, AtomicWriter(location) as writer:
            while data := file.read(_COPY_BYTES):
                writer.write(data)
            writer.commit()


def sync_folder(location: str | PurePath) -> None:
    """Make the names in a folder durable. Raise OSError."""
    storage, path = _at(str(location))
    storage.sync_folder(path)


class Busy(JobsError):
    """Another process holds the folder."""

    retry = True


def exclusive(root: str, patience: float, lock: str = ".lock") -> contextlib.AbstractContextManager[None]:
    """Hold a folder against every other process on this file system, including stopped ones.

    The kernel releases it when the holder dies. Raise `Busy` after `patience` seconds, and
    `StoreError`: always for a remote folder, which has no such lock.
    """
    return _held(root, patience, lock, False)


def shared(root: str, patience: float, lock: str = ".lock") -> contextlib.AbstractContextManager[None]:
    """Hold a folder together with other shared holders, and against exclusive ones."""
    return _held(root, patience, lock, True)


@contextlib.contextmanager
def _held(root: str, patience: float, lock: str, is_shared: bool) -> Iterator[None]:
    path = _local(root)
    if path is None:
        raise StoreError(f"{root} is remote: a batch's folder must be on a file system that has locks")
    with contextlib.ExitStack() as stack:
        with named("cannot write to", root):
            try:
                stack.enter_context(_LOCAL.hold(path, lock, patience, is_shared))
            except BlockingIOError:
                raise Busy(f"{root} is in use by another process") from None
        yield


def sweep(root: str) -> None:
    """Remove half-written files of killed writers, of which a bucket has none.

    The caller must hold `exclusive`.
    """
    if not is_local(root):
        return
    for name in list_names(root):
        if name.startswith(".") and name.endswith(".tmp"):
            delete(join(root, name))


def sweep_beside(location: str) -> None:
    """Remove the remains of killed writers of one file; only its single writer may call this."""
    if not is_local(location):
        return
    folder, _, name = location.rpartition("/")
    half_written = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]+\.tmp")
    for found in list_names(folder or "/"):
        if half_written.fullmatch(found):
            delete(join(folder, found))


@contextlib.contextmanager
def named(what: str, location: str) -> Iterator[None]:
    """Turn errors of the file system into `StoreError`."""
    try:
        yield
    except OSError as error:
        raise store_error(f"{what} {location}", error) from error


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def _at(location: str) -> tuple[Storage, str]:
    """Return the storage of a location, and the path in it."""
    path = _local(location)
    if path is not None:
        return _LOCAL, path
    parts = urlsplit(location)
    with named("cannot use", f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"):  # without secrets
        return open_bucket(location)
