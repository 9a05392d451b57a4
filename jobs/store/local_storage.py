"""Files on a local or mounted file system."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_BUFFER = 1 << 18
_LOCK_POLL_SECONDS = 0.01
_NEW_SECONDS = 10.0  # longest wait for another process that writes the same new file
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalStorage:
    """The `Storage` of paths."""

    def open(self, path: str, buffered: bool = True, unchanging: bool = False) -> BinaryIO:
        return open(path, "rb", buffering=_BUFFER if buffered else 0)

    def open_at(self, path: str, unchanging: bool = False) -> "LocalReader":
        return LocalReader(path)

    def read(self, path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read()

    def stamp(self, path: str) -> tuple[int, int] | None:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None

    def exists(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
            return True
        return False

    def names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(folder)
        return []

    def stamps(self, folder: str) -> dict[str, tuple[int, int]]:
        stamps: dict[str, tuple[int, int]] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = entry.stat()
                    stamps[entry.name] = status.st_size, status.st_mtime_ns
        return stamps

    def folder_stamp(self, folder: str) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            changed_ns = os.stat(folder).st_mtime_ns
            return changed_ns, changed_ns
        return None

    def make_folder(self, path: str) -> None:
        if not os.path.isdir(path):
            self.make_folder(_folder_of(path))
            self.add_folder(path)

    def add_folder(self, path: str) -> None:
        if not os.path.isdir(path):
            Path(path).mkdir(exist_ok=True)
            self.sync_folder(_folder_of(path))

    def begin_folder(self, path: str) -> None:
        Path(path).mkdir()

    keep_folder = make_folder

    def touch(self, path: str) -> None:
        Path(path).touch()
        self.sync_folder(_folder_of(path))

    def read_version(self, path: str) -> tuple[bytes, str]:
        return self.read(path), ""

    def replace_version(self, path: str, data: bytes, version: str) -> str | None:
        with self.writer(path) as writer:
            writer.write(data)
            writer.sync()
            writer.commit(path)
        self.sync_folder(_folder_of(path))
        return ""

    def put_new(self, path: str, data: bytes) -> str | None:
        """Write a new file under a lock, for file systems without hard links."""
        folder, name = os.path.split(path)
        with self.hold(folder, f".{name}.lock", _NEW_SECONDS):
            return None if self.exists(path) else self.replace_version(path, data, "")

    def writer(self, path: str, scratch: str | None = None, unchanging: bool = False) -> "LocalWriter":
        folder, name = os.path.split(path)
        return LocalWriter(os.path.join(_scratch_for(folder or ".", scratch), f".{name}.{os.getpid()}.tmp"))

    def unnamed_writer(self, temporary: str) -> "LocalWriter":
        return LocalWriter(temporary)

    def link(self, source: str, path: str) -> bool:
        try:
            os.link(source, path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    @contextlib.contextmanager
    def hold(self, folder: str, lock: str, patience: float, is_shared: bool = False) -> Iterator[None]:
        """Hold the lock. Raise BlockingIOError after `patience` seconds."""
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        handle = _open_locked(os.path.join(folder, lock), kind, time.monotonic() + patience)
        try:
            yield
        finally:
            os.close(handle)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def clear_folder(self, path: str, first: str, durably: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.delete(os.path.join(path, first))
            if durably:
                self.sync_folder(path)
            for name in os.listdir(path):
                self.delete(os.path.join(path, name))
            os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class LocalReader:
    """Reads at any offset of a file, also after its removal. Thread-safe.

    A failed read raises its OSError, or the error that `fault` makes of it.
    """

    def __init__(self, path: str) -> None:
        self.fault: Callable[[OSError], Exception] | None = None
        self._handle = -1
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._handle, length, offset)
        except OSError as error:
            if self.fault is None:
                raise
            raise self.fault(error) from error

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close  # for a reader that a thread opened for a call that had ended


class LocalWriter:
    """A file that gets its name once it is on disk."""

    def __init__(self, temporary: str) -> None:
        self.file = open(temporary, "wb", buffering=_BUFFER)  # noqa: SIM115 - closed by `commit` or `close`
        self._temporary = temporary
        self._is_open = True

    def write(self, data: bytes) -> int:
        return self.file.write(data)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def commit(self, path: str) -> None:
        self.file.close()
        os.replace(self._temporary, path)
        self._is_open = False

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def __enter__(self) -> "LocalWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open_locked(path: str, kind: int, deadline: float) -> int:
    """Return a handle of the locked file that has the name, since its holder may remove it; of the
    removed one if the folder is gone too, where nothing is left to protect.
    """
    while True:
        with contextlib.ExitStack() as stack:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, handle)
            _lock(handle, kind, deadline)
            if _has_name(handle, path) or not os.path.isdir(os.path.dirname(path)):
                stack.pop_all()
                return handle


def _has_name(handle: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _lock(handle: int, kind: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOCK_POLL_SECONDS)


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def _scratch_for(folder: str, scratch: str | None) -> str:
    """Return `scratch` if it is in `folder` and files can be renamed from it, else `folder`."""
    if scratch is None or os.path.dirname(scratch) != folder or os.stat(scratch).st_dev != os.stat(folder).st_dev:
        return folder
    return scratch
