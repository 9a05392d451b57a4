"""The real Redis that tests run against: one private server per test process, emptied before each
test.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.queue.connection import connect
from jobs.server import PrivateServer
from pipeline.kept_server import KeptServer


@contextmanager
def running_server(directory: Path | None = None) -> Iterator[PrivateServer]:
    """A private server in `directory` (or a fresh temporary one); gone, with its files, at the
    end.
    """
    with tempfile.TemporaryDirectory(prefix="redis-") as fallback, PrivateServer(directory or Path(fallback)) as server:
        yield server


def keep_all_that_is_said(server: PrivateServer | KeptServer) -> None:
    """While a disk is slow, `appendfsync everysec` answers before it writes, and a kill takes along
    what was answered. Until this server is started anew it writes first.
    """
    with connect(server.url) as client:
        client.config_set("appendfsync", "always")


def kill_and_start(server: PrivateServer) -> None:
    """SIGKILL the server, and start it with all that was on disk, at the same URL; it writes before
    it answers from then on, too.
    """
    url = server.url
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server.start()
    assert server.url == url
    keep_all_that_is_said(server)
