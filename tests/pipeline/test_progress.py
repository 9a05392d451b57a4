"""What a person reads while a batch runs."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import islice
from pathlib import Path

import pytest

from pipeline.progress import BarProgress, Counts, PlainProgress, Rate, describe, duration
from tests.support.commands import command_environment
from tests.support.control_plane import ROOT

LOG_TIME = re.compile(r"\d\d:\d\d:\d\d")
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [\w-]+ (INFO|WARNING|ERROR) ")
RUNNING = re.compile(r"[1-9]\d* running, \d+ waiting, [1-9][\d,]* tokens/s")
LOGGING = """
import logging, time
from jobs.process import configure_logs
from pipeline.progress import Counts, make_progress

configure_logs("early")
with make_progress() as progress:
    for number in range(5):
        progress.update(Counts(total=5, done=number, running=1, tokens=number))
        logging.info("record %d", number)
        progress.say(f"10:00:00 child INFO line {number}")
        time.sleep(0.3)
"""


def test_a_line_says_done_running_waiting_rate_and_time_left() -> None:
    rate = Rate()
    rate.add(Counts(total=100, done=0, tokens=0), 0.0)
    last = Counts(total=100, done=20, failed=2, running=30, tokens=500)
    rate.add(last, 5.0)
    assert describe(last, rate) == "20 done, 2 of them failed, 30 running, 50 waiting, 100 tokens/s, 20 s left"


def test_the_rate_forgets_what_is_long_ago() -> None:
    rate = Rate()
    for second in range(60):
        rate.add(Counts(total=1000, done=second, tokens=0 if second < 40 else 10 * (second - 40)), float(second))
    assert rate.tokens_per_second == pytest.approx(10.0)


def test_the_time_before_the_first_request_runs_does_not_count() -> None:
    rate = Rate()
    for second in range(5):
        rate.add(Counts(total=10, note="waiting for the model to load"), float(second))
    rate.add(Counts(total=10, done=5, running=5, tokens=50), 5.0)
    assert (rate.tokens_per_second, rate.seconds_left) == (pytest.approx(50.0), pytest.approx(1.0))


def test_a_running_batch_always_has_a_rate() -> None:
    assert describe(Counts(total=2, running=2), Rate()) == "0 done, 2 running, 0 waiting, 0 tokens/s"


def test_a_note_is_alone_while_nothing_runs() -> None:
    assert describe(Counts(note="checking the input"), Rate()) == "checking the input"
    assert describe(Counts(total=3, done=1, note="waiting for a worker"), Rate()) == "1 of 3 done; waiting for a worker"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3660, "1 h 1 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_only_when_something_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainProgress() as progress:
        for _ in range(5):
            progress.update(Counts(total=2, note="checking the input"))
        progress.say("said")
    assert capsys.readouterr().err.splitlines() == ["checking the input", "said"]


def test_the_bar_takes_any_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress() as progress:
        progress.update(Counts(note="checking the input"))
        progress.update(Counts(total=10, done=5, running=2, tokens=100))
        progress.say("[not markup]")
    assert "[not markup]" in capsys.readouterr().err


def test_log_records_and_lines_begin_a_row_of_the_terminal() -> None:
    rows = in_terminal(sys.executable, "-c", LOGGING)
    found = [row for row in rows if LOG_TIME.search(row)]
    assert [row for row in found if not LOG_LINE.match(row)] == []
    assert sum("early INFO record" in row for row in found) == sum("child INFO line" in row for row in found) == 5


@pytest.mark.proof
def test_run_batch_shows_its_rate_in_a_terminal(tmp_path: Path) -> None:
    rows = in_terminal(*run_batch(tmp_path))
    found = [row for row in rows if LOG_TIME.search(row)]
    assert found
    assert [row for row in found if not LOG_LINE.match(row)] == []
    assert any(RUNNING.search(row) for row in rows)


@pytest.mark.proof
def test_run_batch_prints_whole_lines_into_a_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        run_batch(tmp_path),
        env=command_environment(None, {}),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert "\x1b" not in done.stderr
    assert [line for line in lines if LOG_TIME.search(line) and not LOG_LINE.match(line)] == []
    assert any(re.search(r"running, \d+ waiting, [\d,]+ tokens/s", line) for line in lines)


def run_batch(folder: Path) -> list[str]:
    """Return the command that answers the first 300 example requests."""
    requests = folder / "requests.jsonl"
    with (ROOT / "examples" / "requests.jsonl").open() as examples:
        requests.write_text("".join(islice(examples, 300)))
    return [sys.executable, "-m", "pipeline", "run-batch", str(requests)]


def in_terminal(*command: str) -> list[str]:
    """Return every state of every row that a command draws on a terminal of 250 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 250, 0, 0))
    environment = command_environment(None, {"TERM": "xterm-256color"})
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            output += chunk
    except OSError:  # EIO: the last process has closed the terminal
        pass
    os.close(ours)
    assert process.wait(60) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    return [row for row in re.split(r"[\r\n]+", plain) if row]
