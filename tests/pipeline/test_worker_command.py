"""The core that `pipeline worker` launches first of all: a failed launch is reported, and the core
ends with whatever fails after it.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis

from tests.pipeline.conftest import RunHere
from tests.support.commands import RunningCommand, command_environment
from workers.engine.client import launch
from workers.engine.client.launch import LaunchedCore

STOPPED_IN_A_DESTRUCTOR = """
import signal, sys
from pipeline.main import main

class Doomed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def stop_in_import(event, arguments):
    if event == "import" and arguments[0] == "workers.worker":
        Doomed()

sys.addaudithook(stop_in_import)
main()
"""

STOPPED_IN_A_CLASS_BODY = """
import signal, sys
from pipeline.main import main

class Named:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.Signals[sys.argv.pop()])

def stop_in_import(event, arguments):
    if event == "import" and arguments[0] == "workers.worker":
        type("Owner", (), {"name": Named()})

sys.addaudithook(stop_in_import)
main(["worker"])
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchedCore]:
    """The cores that were launched."""
    cores: list[LaunchedCore] = []
    original = launch.launch_core

    def keep(*arguments: Any) -> LaunchedCore:
        cores.append(original(*arguments))
        return cores[-1]

    monkeypatch.setattr(launch, "launch_core", keep)
    return cores


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_core_that_cannot_be_started_is_reported(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", fail)
    done = run_here("worker", REDIS_URL="unix:///nowhere/redis.sock")
    assert done.code == 2
    assert (
        done.err.splitlines()[-1] == f"Error: the engine core cannot be started: [Errno {number}] {os.strerror(number)}"
    )


def test_no_core_is_left_when_redis_is_away(run_here: RunHere, launched: list[LaunchedCore], tmp_path: Path) -> None:
    done = run_here("worker", REDIS_URL=f"unix://{tmp_path}/redis.sock")
    assert done.code == 1
    assert "Redis cannot be used" in done.err
    check_gone(launched)


def test_a_redis_that_goes_away_while_the_worker_starts_is_no_refusal_and_leaves_no_core(
    run_here: RunHere, launched: list[LaunchedCore], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(client: object) -> NoReturn:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr("workers.worker.check_server", fail)
    done = run_here("worker", REDIS_URL=redis_url)
    assert done.code == 1  # with 2 a supervisor would not start it again
    assert "Redis cannot be used: gone" in done.err
    check_gone(launched)


def test_an_order_to_stop_while_redis_is_looked_at_is_obeyed(
    run_here: RunHere, launched: list[LaunchedCore], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_and_fail(_: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        raise redis.ConnectionError("gone")

    monkeypatch.setattr("workers.worker.check_server", stop_and_fail)
    done = run_here("worker", REDIS_URL=redis_url)
    assert (done.code, "Error" in done.err) == (0, False)
    check_gone(launched)


def test_no_core_is_left_by_a_sigterm_that_comes_early(
    run_here: RunHere, launched: list[LaunchedCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another command that ran in this process may have set its own
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("jobs.queue.connection.check_server", lambda client: os.kill(os.getpid(), signal.SIGTERM))
    done = run_here("worker", REDIS_URL="unix:///nowhere/redis.sock")
    assert done.code == 128 + signal.SIGTERM
    check_gone(launched)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_whose_exception_was_lost_is_obeyed(redis_url: str) -> None:
    """It comes in a destructor, while the worker is imported."""
    environment = command_environment(redis_url, {})
    worker = RunningCommand([sys.executable, "-c", STOPPED_IN_A_DESTRUCTOR, "worker"], environment)
    try:
        worker.wait_for("SIGTERM: stopping", 60)
        assert worker.wait(60) == 0
        assert "Traceback" not in worker.output
    finally:
        worker.stop()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_comes_while_a_class_is_imported_is_obeyed(
    redis_url: str, number: signal.Signals, code: int
) -> None:
    environment = command_environment(redis_url, {})
    worker = RunningCommand([sys.executable, "-c", STOPPED_IN_A_CLASS_BODY, number.name], environment)
    try:
        assert worker.wait(60) == code
        assert "Traceback" not in worker.output
    finally:
        worker.stop()


def check_gone(launched: list[LaunchedCore]) -> None:
    """One was launched, and has been waited for."""
    (core,) = launched
    assert core.process.returncode is not None
    assert core.process.stderr is not None
    assert core.process.stderr.closed
    assert core.connection.fileno() == -1
