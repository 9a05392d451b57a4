"""The sockets that API processes listen on: at an address, at a path, or inherited.

The supervisor of several API processes listens once and hands the socket on, so that no new
connection is lost when a process ends. The processes share how many connections each has; the one
with the fewest accepts the next.
"""

import contextlib
import io
import mmap
import os
import socket
import stat
from collections.abc import Iterator

from api.http_settings import HttpSettings
from jobs.host import shared_file

INHERITED_VARIABLE = "PIPELINE_LISTENER"
"""The inherited descriptors of socket and counts, and the place of the process in the counts."""

_BACKLOG = 2048
_BYTES = 4
_AWAY = 2**31 - 1
_OLD_SOCKET_SECONDS = 1.0


class ConnectionCounts:
    """The number of connections of each process, in shared memory.

    A process that accepts none counts as one with very many.
    """

    def __init__(self, fd: int, processes: int, own: int = 0) -> None:
        self._memory = memoryview(mmap.mmap(fd, _BYTES * processes)).cast("i")
        self._own = own

    def publish(self, connections: int) -> None:
        """Set the number of this process."""
        self._memory[self._own] = connections

    def leave(self, process: int | None = None) -> None:
        """Note that a process, by default this one, accepts no connections now."""
        self._memory[self._own if process is None else process] = _AWAY

    def may_accept(self) -> bool:
        """Return whether no other process has fewer connections than this one."""
        return self._memory[self._own] <= min(self._memory)


class SharedListener:
    """A socket that several processes accept from, held by their supervisor."""

    def __init__(self, listener: socket.socket, processes: int) -> None:
        self._listener = listener
        self._memory = shared_file("api-connections")
        self._memory.truncate(_BYTES * processes)
        self._counts = ConnectionCounts(self._memory.fileno(), processes)
        for number in range(processes):
            self._counts.leave(number)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Return the descriptors that a process inherits."""
        return self._listener.fileno(), self._memory.fileno()

    def environment(self, number: int) -> dict[str, str]:
        """Return the variable with the descriptors of process `number`."""
        return {INHERITED_VARIABLE: ",".join(map(str, (*self.descriptors, number)))}

    def leave(self, number: int) -> None:
        """Note that process `number` has died."""
        self._counts.leave(number)

    def close(self) -> None:
        """Close the supervisor's end.

        Connections are refused once all processes have closed theirs.
        """
        self._listener.close()
        self._memory.close()


@contextlib.contextmanager
def listening(settings: HttpSettings) -> Iterator[socket.socket]:
    """Yield the socket of the settings; the path of a Unix socket is removed at the end.

    Raises OSError whose text names the address.
    """
    if settings.uds is None:
        with listen(settings.host, settings.port) as listener:
            yield listener
        return
    with _listen_at(settings.uds) as listener:
        made = os.stat(settings.uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(settings.uds).st_ino == made:
                    os.unlink(settings.uds)


def inherited() -> tuple[socket.socket, ConnectionCounts] | None:
    """Return the inherited socket and counts, None if this process inherits none."""
    given = os.environ.get(INHERITED_VARIABLE)
    if given is None:
        return None
    listener, counts, own = map(int, given.split(","))
    with io.FileIO(counts, "r+") as memory:
        processes = os.fstat(counts).st_size // _BYTES
        return socket.socket(fileno=listener), ConnectionCounts(memory.fileno(), processes, own)


def address(listener: socket.socket, scheme: str) -> str:
    """Return the address of a socket for a log line."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"{scheme} at the Unix socket {name}"
    host, port = name[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError whose text names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _listen_at(path: str) -> socket.socket:
    """Return a listening Unix socket; one of a dead process is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {path}: {error.strerror or error}") from None
    return listener


def _is_left_behind(path: str) -> bool:
    """Return whether the path is a socket on which no process listens."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_OLD_SOCKET_SECONDS)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                return True
    return False
