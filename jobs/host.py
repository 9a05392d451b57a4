"""Functions of Linux alone, each with a portable way beside it, which macOS takes.

PIPELINE_PORTABLE=1 has Linux take the portable ways too, so that its tests run them. The engine
imports nothing of `jobs`, and its processes are all Python's: it has its own way to end with a
parent (`workers/engine/process.py`).
"""

import contextlib
import ctypes
import io
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before a fork, after which nothing may be
_LOOK_SECONDS = 0.25
_MOST_INHERITED = 1024  # descriptors that are looked at
_WATCHER = """
trap "" HUP INT TERM
while kill -0 "$1" && kill -0 "$2"; do sleep 1; done
kill -0 "$1" || kill -9 "$2"
"""


def has_linux() -> bool:
    """Return whether this process may use functions of Linux alone."""
    return sys.platform == "linux" and not os.environ.get("PIPELINE_PORTABLE")


class WakeUp:
    """A file to wait for, which another thread makes readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self) -> None:
        """Make the file readable."""
        with contextlib.suppress(BlockingIOError):  # it is full, so readable
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the file unreadable until `ring` is called again."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def tie_to_parent(parent: int) -> None:
    """Have this process killed once its parent is gone, and also the program that it becomes.

    Linux kills it once the thread that started it is gone. Elsewhere a shell beside it looks every
    second whether the process `parent` is there, and ends with this process.
    """
    if has_linux():
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    actions: list[tuple[int, int] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_CLOSE, fd) for fd in range(3, _MOST_INHERITED) if _is_inherited(fd)
    ]
    actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    command = ["sh", "-c", _WATCHER, "sh", str(parent), str(os.getpid())]
    os.posix_spawn("/bin/sh", command, os.environ, file_actions=actions, setpgroup=0)


def wait_for_end(pid: int, is_running: Callable[[], bool], wake_up: WakeUp) -> None:
    """Wait until a child process has ended, or the file is readable."""
    if not has_linux():
        while is_running() and not select.select([wake_up], [], [], _LOOK_SECONDS)[0]:
            pass
        return
    process = os.pidfd_open(pid)
    try:
        ended = select.poll()
        for one in (process, wake_up):
            ended.register(one, select.POLLIN)
        ended.poll()
    finally:
        os.close(process)


def shared_file(name: str) -> BinaryIO:
    """Return an empty file without a place, for memory that processes share."""
    if has_linux():
        return open(os.memfd_create(name), "r+b", buffering=0)
    return tempfile.TemporaryFile(prefix=f"{name}-", buffering=0)


def open_again(file: BinaryIO, buffering: int) -> BinaryIO:
    """Open a file without a name once more to read it, with a position of its own."""
    if has_linux():
        return open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=buffering)
    raw = _PositionedFile(os.dup(file.fileno()))
    size = io.DEFAULT_BUFFER_SIZE if buffering < 0 else buffering
    return io.BufferedReader(raw, size) if size else raw  # type: ignore[return-value]


class _PositionedFile(io.RawIOBase):
    """Read a file from a position of its own, though its descriptor is shared; own that one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = os.pread(self._fd, len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning of the file")
        self._position = start + offset
        return self._position

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
