"""`pipeline top` as a process: on a terminal, in a pipe, and while Redis is away."""

import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from pipeline.top import screen
from tests.pipeline.conftest import RunHere
from tests.support.commands import command, command_environment, run_pipeline
from tests.support.redis_machine import RedisMachine
from tests.support.requests import start_batch
from tests.support.terminal import Terminal, on_terminal
from tests.support.waiting import wait_until

BATCH = "batch_66120041c39a979f3af80b25"


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisMachine]:
    """A Redis that can be taken away."""
    found = RedisMachine(tmp_path_factory.mktemp("r"))
    found.start()
    yield found
    found.stop()


def add_work(queue: Queue) -> None:
    queue.register_worker(WorkerRecord("worker-1", ["m"], "ready", 128, time.time(), "host", 1))
    start_batch(queue, BATCH, 4)
    queue.announce("", BATCH, listed=False, runs=True)


def top(url: str, **environment: str) -> AbstractContextManager[Terminal]:
    """The command on a terminal of 80 columns and 24 rows."""
    arguments = command("top", "--interval", 0.2)
    return on_terminal(arguments, command_environment(url, {"TERM": "xterm-256color", **environment}))


def check_restored(terminal: Terminal) -> None:
    """The normal screen and the cursor are back, and keys are seen again."""
    assert "\x1b[?1049h" in terminal.output
    assert terminal.output.rindex("\x1b[?1049l") > terminal.output.rindex("\x1b[H")
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")
    assert terminal.modes_after == terminal.modes_before


def test_frames_follow_the_fleet_and_the_size_of_the_window(queue: Queue, redis_url: str) -> None:
    with top(redis_url, COLUMNS="100", LINES="40") as terminal:
        frame = terminal.wait_for("Redis answers", "no batch", "no worker is alive")
        assert len(frame) == 24
        assert max(map(len, frame)) <= 80
        add_work(queue)
        frame = terminal.wait_for("worker-1", "in_progress")
        assert max(map(len, frame)) <= 80
        terminal.resize(140, 30)
        assert len(terminal.wait_for(BATCH)) == 30
        terminal.resize(70, 11)
        wait_until(lambda: len(terminal.frame) == 11, 120, "a frame of the smaller window")
        frame = terminal.wait_for("in_progress", "worker-1")
        assert max(map(len, frame)) <= 70
        terminal.press(b"q")
        assert terminal.end() == 0
        check_restored(terminal)


@pytest.mark.parametrize(
    "ending",
    [
        b"q",
        pytest.param(b"Q", marks=pytest.mark.proof),
        b"\x03",
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.proof),
    ],
)
def test_keys_and_signals_end_it_and_restore_the_terminal(redis_url: str, ending: bytes | signal.Signals) -> None:
    with top(redis_url) as terminal:
        terminal.wait_for("Redis answers")
        terminal.press(b"xyz")
        if isinstance(ending, bytes):
            terminal.press(ending)
        else:
            terminal.process.send_signal(ending)
        assert terminal.end() == 0
        check_restored(terminal)


def test_keys_that_ctrl_c_takes_back_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal drops them when it turns the key into a signal."""
    ours, theirs = pty.openpty()
    try:
        with open(theirs, closefd=False) as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            with screen._keys() as keys:
                os.write(ours, b"xyz")
                assert select.select(keys, [], [], 60)[0]
                termios.tcflush(theirs, termios.TCIFLUSH)
                assert os.read(keys[0], 1024) == b""
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_that_is_gone_is_noticed() -> None:
    ours, theirs = pty.openpty()
    try:
        assert not screen._is_quit((theirs,))
        os.close(ours)
        assert screen._is_quit((theirs,))
    finally:
        os.close(theirs)


def test_without_colors_nothing_is_colored(queue: Queue, redis_url: str) -> None:
    add_work(queue)
    with top(redis_url, NO_COLOR="1") as terminal:
        terminal.wait_for("in_progress")
        assert "\x1b[3" not in terminal.output
    with top(redis_url) as terminal:
        terminal.wait_for("in_progress")
        assert "\x1b[32m" in terminal.output


@pytest.mark.parametrize("emptied", [False, True])
def test_a_redis_that_is_away_is_said_and_it_goes_on_when_it_returns(machine: RedisMachine, emptied: bool) -> None:
    with connect(machine.url) as client, top(machine.url) as terminal:
        add_work(Queue(client))
        terminal.wait_for("in_progress", "Redis answers")
        if emptied:
            machine.lose_everything()
        else:
            machine.kill()
        terminal.wait_for("no answer from Redis for", "in_progress")
        machine.start()
        terminal.wait_for("Redis answers", "no batch" if emptied else "in_progress")
        terminal.press(b"q")
        assert terminal.end() == 0


def test_keys_work_while_redis_hangs(machine: RedisMachine) -> None:
    with top(machine.url) as terminal:
        terminal.wait_for("Redis answers")
        os.kill(machine.pid, signal.SIGSTOP)
        try:
            terminal.wait_for("no answer from Redis for")
            terminal.press(b"q")
            assert terminal.end() == 0
        finally:
            os.kill(machine.pid, signal.SIGCONT)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_one_plain_frame_goes_into_a_pipe(queue: Queue, redis_url: str, environment: dict[str, str]) -> None:
    add_work(queue)
    done = run_pipeline("top", "--interval", 0.1, redis_url=redis_url, **environment)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert {BATCH, "worker-1"} <= {line.split()[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(("flags", "environment"), [(["--once"], {}), ([], {"TERM": "dumb"})])
def test_one_plain_frame_goes_to_a_terminal(
    queue: Queue, redis_url: str, flags: list[str], environment: dict[str, str]
) -> None:
    add_work(queue)
    arguments = command("top", "--interval", 0.1, *flags)
    with on_terminal(arguments, command_environment(redis_url, {"TERM": "xterm", **environment})) as terminal:
        assert terminal.end() == 0
        assert "worker-1" in terminal.output
        assert "\x1b" not in terminal.output


def test_a_redis_that_is_away_at_the_start_is_refused_in_a_sentence(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here("top", "--once", REDIS_URL=f"unix://{tmp_path}/none")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: Redis cannot be used: ")


def test_it_needs_the_queue_of_a_fleet(run_here: RunHere) -> None:
    done = run_here("top", "--once")
    assert (done.code, done.err) == (2, "Error: `pipeline top` needs the queue of a fleet: set REDIS_URL\n")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x"])
def test_an_interval_that_is_none_is_refused(run_here: RunHere, redis_url: str, interval: str) -> None:
    done = run_here("top", "--once", "--interval", interval, REDIS_URL=redis_url)
    assert done.code == 2
    assert "--interval" in done.err
