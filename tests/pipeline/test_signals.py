"""Orders to stop as shells and terminals give them."""

import os
import signal
import sys
from pathlib import Path

import pytest

from pipeline.signals import Signals
from tests.support.commands import RunningCommand, command, command_environment
from tests.support.processes import catches, command_line, descendants
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof


def test_a_lost_terminal_is_one_order_however_often_it_is_reported() -> None:
    with Signals() as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert signals.wait(0)
        assert signals.stops == 1
        signal.raise_signal(signal.SIGTERM)
        assert signals.stops == 2
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_is_no_order(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(number)
            assert signals.stops == 0
    finally:
        signal.signal(number, before)


def test_ends_of_children_are_watched_where_they_were_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGCHLD)
            assert signals.wait(0)
            assert signals.stops == 0
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_command_under_nohup_outlives_its_terminal(redis_url: str, tmp_path: Path) -> None:
    arguments = ["nohup", *command("jobs", "--file-store", tmp_path)]
    jobs = RunningCommand(arguments, command_environment(redis_url, {}))
    try:
        wait_until(lambda: catches(jobs.process.pid, signal.SIGCHLD), 60, "signals to be watched")
        wait_until(lambda: tickers(jobs), 60, "the ticker")
        jobs.process.send_signal(signal.SIGHUP)
        os.kill(tickers(jobs)[0], signal.SIGKILL)
        jobs.wait_for("the ticker process was killed by SIGKILL; restarting it", 60)
        jobs.process.terminate()
        assert jobs.wait(60) == 0
    finally:
        jobs.stop()


def tickers(jobs: RunningCommand) -> list[int]:
    """The processes that run the ticker by now, and no longer the command."""
    below = descendants(jobs.process.pid)
    return [pid for pid in below if command_line(pid).startswith(f"{sys.executable} -P -m jobs.control.ticker")]
