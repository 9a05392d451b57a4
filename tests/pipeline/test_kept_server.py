"""The private Redis of a command is restarted soon after it was killed, with its data, while its
clients wait.
"""

import os
import signal
import threading
from pathlib import Path

import pytest

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.server import PrivateServer, ServerError
from pipeline.kept_server import KeptServer
from tests.support.processes import command_line, descendants
from tests.support.redis_server import keep_all_that_is_said
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof


def kill_server(directory: Path) -> None:
    pid = next(pid for pid in descendants(os.getpid()) if str(directory) in command_line(pid))
    os.kill(pid, signal.SIGKILL)


def test_calls_made_while_it_is_away_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    start, is_up = PrivateServer.start, threading.Event()

    def start_and_notify(server: PrivateServer) -> None:
        start(server)
        is_up.set()  # its clients may be answered before its owner has seen it up

    monkeypatch.setattr(PrivateServer, "start", start_and_notify)
    with KeptServer(tmp_path / "redis", said.append) as server, connect(server.url) as client:
        keep_all_that_is_said(server)
        queue = Queue(client)
        queue.create_batch("batch_x", 3)
        for _ in range(3):
            assert is_up.wait(60)
            is_up.clear()
            kill_server(tmp_path)
            assert queue.batch_fields("batch_x").total == 3
        assert said == ["the private Redis ended; restarting it"] * 3


def test_one_that_ends_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.kept_server._STARTS_ALLOWED", 1)
    with KeptServer(tmp_path / "redis", lambda line: None) as server:
        kill_server(tmp_path)
        with connect(server.url) as client:
            Queue(client).batches()
        kill_server(tmp_path)
        wait_until(lambda: server.failure, 60, "it to be given up")
        assert server.failure == "the private Redis ended 2 times"


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        KeptServer(tmp_path / "redis", lambda line: None),
        pytest.raises(ServerError, match="Another process runs a private Redis"),
        KeptServer(tmp_path / "redis", lambda line: None),
    ):
        pass
