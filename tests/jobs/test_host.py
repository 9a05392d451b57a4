"""Functions of Linux alone, and the portable ways beside them, by the same tests."""

import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from jobs.host import WakeUp, has_linux, open_again, shared_file, wait_for_end
from tests.support.commands import REPOSITORY
from tests.support.processes import is_running
from tests.support.waiting import wait_until

SECONDS = 60
PARENT_OF_SLEEP = """
import functools, os, subprocess, time
from jobs.process import die_with_parent
child = subprocess.Popen(["sleep", "600"], preexec_fn=functools.partial(die_with_parent, os.getpid()))
print(child.pid, flush=True)
time.sleep(600)
"""
PARENT_OF_CORE = """
import os, subprocess, sys, time
program = '''
import os, socket, sys, time
from workers.engine.process import become_child
become_child(int(sys.argv[1]), socket.socketpair()[0], "core", 20)
print("set up", file=sys.stderr, flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())], stderr=subprocess.PIPE)
child.stderr.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["linux", "portable"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PIPELINE_PORTABLE", "1" if request.param == "portable" else "")
    assert has_linux() == (request.param == "linux" and sys.platform == "linux")
    return str(request.param)


def is_readable(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up], [], [], 0)[0])


def test_a_wake_up_can_be_waited_for_until_it_is_cleared() -> None:
    wake_up = WakeUp()
    assert not is_readable(wake_up)
    for _ in range(100_000):  # more than any buffer holds
        wake_up.ring()
    assert is_readable(wake_up)
    wake_up.clear()
    assert not is_readable(wake_up)
    wake_up.close()


def test_the_end_of_a_child_and_a_wake_up_end_the_waiting() -> None:
    wake_up = WakeUp()
    child = subprocess.Popen(["sleep", "600"])
    waiting = [
        threading.Thread(target=wait_for_end, args=(child.pid, lambda: child.poll() is None, wake_up), daemon=True)
        for _ in range(2)
    ]
    waiting[0].start()
    wake_up.ring()
    waiting[0].join(SECONDS)
    assert not waiting[0].is_alive()
    wake_up.clear()
    waiting[1].start()
    child.send_signal(signal.SIGTERM)
    waiting[1].join(SECONDS)
    assert not waiting[1].is_alive()
    child.wait()
    wake_up.close()


@pytest.mark.parametrize("program", [PARENT_OF_SLEEP, PARENT_OF_CORE], ids=["program", "core"])
def test_a_child_ends_with_its_parent(program: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child), SECONDS, "the child to end")


def test_a_watched_child_holds_no_pipe_of_its_parent_open_after_its_end() -> None:
    program = "import os; from jobs.process import die_with_parent; die_with_parent()"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert child.communicate(timeout=SECONDS)[0] == b""
    assert child.returncode == 0


def test_processes_share_the_memory_of_a_file_without_a_place() -> None:
    with shared_file("counts") as file:
        file.truncate(4)
        program = f"import mmap; mmap.mmap({file.fileno()}, 4)[:2] = b'ab'"
        subprocess.run([sys.executable, "-c", program], pass_fds=[file.fileno()], check=True)
        assert mmap.mmap(file.fileno(), 4)[:] == b"ab\0\0"


@pytest.mark.parametrize("buffering", [0, -1, 2])
def test_readers_of_one_file_have_their_own_positions(buffering: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789")
        file.flush()
        with open_again(file, buffering) as one, open_again(file, buffering) as other:
            assert one.read(3) == b"012"
            assert other.read(4) == b"0123"
            assert one.seek(-2, os.SEEK_END) == 8
            assert one.read() == b"89"
            assert other.seek(1, os.SEEK_CUR) == 5
            assert other.read(2) == b"56"
            assert file.tell() == 10
            with pytest.raises(OSError, match=r"."):
                other.seek(-1)
        with open_again(file, buffering) as again:
            assert again.read(1) == b"0"
