"""Commands go on when their stderr cannot be written: its reader or its terminal is gone."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from jobs.queue.request_queue import Queue
from tests.support.commands import REPOSITORY, command_environment
from tests.support.processes import command_line, descendants
from tests.support.waiting import wait_for_value, wait_until

pytestmark = pytest.mark.proof

CHATTY = """
import sys
for _ in range(2_000):
    print("a line of an eighth of a kilobyte, of which a pipe holds half a thousand" + 56 * ".")
open(sys.argv[1], "a").write("ended\\n")
sys.exit(1)
"""
KEEPER = """
import os, sys, time
from pathlib import Path
from pipeline.child import Child
from pipeline.progress import Counts, make_progress
from pipeline.run import print_line

way, program, ends = sys.argv[1:]
Path(ends).touch()
with make_progress() as progress:
    os.write(1, f"{type(progress).__name__}\\n".encode())  # a bar has stdout's lines printed above it
    sys.stdin.read()  # until stderr is lost
    say = print_line if way == "line" else progress.say
    child = Child("chatty", lambda: [sys.executable, "-c", program, ends], {}, say)
    child.start()
    while len(Path(ends).read_text().splitlines()) < 3:
        child.check()
        progress.update(Counts(note="waiting"))
        time.sleep(0.01)
Path(ends).write_text("done")
"""
VERBOSE_CHILDREN = """
import os, sys
from pipeline.main import main

os.environ["PYTHONVERBOSE"] = "1"
print("started", file=sys.stderr, flush=True)
main()
"""
Open = Callable[[], tuple[int, int]]


@pytest.mark.parametrize(("way", "opened"), [("line", os.pipe), ("progress", os.pipe), ("progress", pty.openpty)])
def test_children_are_read_and_restarted_when_their_lines_cannot_be_written(
    tmp_path: Path, way: str, opened: Open
) -> None:
    ends = tmp_path / "ends"
    ours, theirs = opened()
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, way, CHATTY, ends],
        cwd=REPOSITORY,
        env=command_environment(None, {"TERM": "xterm-256color"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    try:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == ("BarProgress\n" if opened is pty.openpty else "PlainProgress\n")
        os.close(ours)
        keeper.stdin.close()
        wait_until(lambda: keeper.poll() is not None, 60, "the third child to end")
        assert ends.read_text() == "done"
    finally:
        keeper.kill()
        keeper.wait()
        for stream in (keeper.stdin, keeper.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def unread_command(redis_url: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose children print each import, and whose own lines are read no more once it
    runs.
    """
    environment = command_environment(redis_url, {})
    environment.pop("PYTHONUNBUFFERED", None)  # with it stderr keeps nothing that its end would try to write
    process = subprocess.Popen(
        [sys.executable, "-c", VERBOSE_CHILDREN, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr as lines:
        assert lines.readline() == b"started\n"
    try:
        yield process
    finally:
        process.terminate()
        try:
            wait_for_value(process.poll, 0, 60, "the command to end in order")
        finally:
            process.kill()
            process.wait()


def test_the_control_plane_works_and_restarts_without_a_reader_of_its_lines(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with unread_command(redis_url, "jobs", "--file-store", tmp_path) as jobs:
        token = wait_until(lambda: redis_client.get("{q}:leader"), 120, "the ticker to lead")
        ticker = next(pid for pid in descendants(jobs.pid) if "jobs.control.ticker" in command_line(pid))
        os.kill(ticker, signal.SIGKILL)
        wait_until(lambda: redis_client.get("{q}:leader") not in (None, token), 120, "the next ticker to lead")
        assert jobs.poll() is None


def test_a_worker_loads_its_model_without_a_reader_of_its_lines(queue: Queue, redis_url: str) -> None:
    with unread_command(redis_url, "worker") as worker:
        wait_until(lambda: [one.state for one in queue.workers()] == ["ready"], 200, "the worker to be ready")
        assert worker.poll() is None
