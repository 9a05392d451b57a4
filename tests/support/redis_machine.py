"""A Redis to which anything may happen that happens to a machine: killed, emptied, stopped, its
disk full, its clock set.
"""

import contextlib
import os
import resource
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import redis

from jobs.queue.connection import connect
from jobs.server import PrivateServer, find_server
from tests.support.clock import Clock


class RedisMachine:
    """The server always comes back under the same address, with what its append-only file holds."""

    def __init__(self, folder: Path) -> None:
        """`folder` is new or empty, and its path short enough for a socket in it."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.clock = Clock(folder / "clock")
        self._options = folder / "options"
        self._options.write_text("")
        self._server = PrivateServer(folder / "data")
        self._log = folder / "data" / "appendonlydir"
        self._make_wrapper()
        self.starts = 0

    @property
    def url(self) -> str:
        """Where it is, also while it is not."""
        return f"unix://{self._folder}/data/socket/redis.sock"

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        return self._server.is_running()

    def start(self, *options: str) -> None:
        """Starts it, with more options than a private server has; returns once it answers and its
        file is loaded.
        """
        with self._ready_to_start(options):
            self._server.start()
        assert self._server.url == self.url, "the folder's path is too long for a socket"
        self.starts += 1

    def stop(self) -> None:
        """In good order; the file stays."""
        self._server.stop()

    def kill(self) -> None:
        """SIGKILL; the process is gone when this returns, and only what is in the append-only file
        is left: all that it has answered.
        """
        with contextlib.suppress(redis.RedisError), connect(self.url) as client:
            # `everysec` answers before it writes while a disk is slow
            client.config_set("appendfsync", "always")
        os.kill(self.pid, signal.SIGKILL)
        self._server.stop()

    def lose_everything(self) -> None:
        """Its disk is gone, and it with it: the next start begins with nothing."""
        self.kill()
        shutil.rmtree(self._log)

    def on_disk(self) -> dict[Path, int]:
        """Its files and their sizes, as of now."""
        return {path: path.stat().st_size for path in self._log.iterdir()}

    def lose_power(self, on_disk: dict[Path, int]) -> None:
        """Nothing but what was on disk then is left of its file, which is what a power loss does to
        the last second.
        """
        self.kill()
        for path, size in on_disk.items():
            if path.exists():
                os.truncate(path, size)

    def hang(self) -> None:
        """SIGSTOP, until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        """No file of it can grow any more, until `free_disk`: writes then fail with MISCONF."""
        self._limit_files(0)

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def repair(self) -> None:
        """Undoes what a test has left broken that failed half-way."""
        if not self.is_running:
            self._server.stop()
            self.start()
        self.go_on()
        self.free_disk()

    def _limit_files(self, size: int) -> None:
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))

    @contextlib.contextmanager
    def _ready_to_start(self, options: tuple[str, ...]) -> Iterator[None]:
        self._options.write_text(shlex.join(options))
        with mock.patch.dict(os.environ, PATH=f"{self._folder}/bin:{os.environ['PATH']}"):
            yield

    def _make_wrapper(self) -> None:
        """The server as found on PATH: with the clock, more options, and deaf to the signal that a
        full disk would kill it with.
        """
        wrapper = self._folder / "bin" / "valkey-server"
        environment = shlex.join(f"{name}={value}" for name, value in self.clock.environment.items())
        wrapper.parent.mkdir()
        wrapper.write_text(
            f'#!/bin/sh\ntrap \'\' XFSZ\neval "set -- \\"\\$@\\" $(cat {shlex.quote(str(self._options))})"\n'
            f'exec env {environment} {shlex.quote(str(find_server()))} "$@"\n'
        )
        wrapper.chmod(0o755)


@contextlib.contextmanager
def running_redis_machine(*options: str) -> Iterator[RedisMachine]:
    """A running one in a folder of its own, which is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        machine = RedisMachine(Path(folder))
        machine.start(*options)
        try:
            yield machine
        finally:
            machine.stop()
