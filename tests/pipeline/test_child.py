"""A child is kept running, given up when that is hopeless, and never outlives its parent."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batch_inference_pipeline.private_folder import private_folder, remove_abandoned
from pipeline.child import Child
from pipeline.errors import ChildFailed, ChildRefused
from tests.support.processes import command_line, descendants, is_running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

FOREVER = "import time; print('up', flush=True); time.sleep(600)"
Make = Callable[..., Child]


@pytest.fixture
def said() -> list[str]:
    """What children printed, and what was said about them."""
    return []


@pytest.fixture
def make(said: list[str]) -> Iterator[Make]:
    """Starts a child that runs a Python program."""
    children: list[Child] = []

    def start(program: str, on_death: Callable[[int], None] = lambda pid: None) -> Child:
        children.append(Child("test", lambda: [sys.executable, "-c", program], {}, said.append, on_death))
        children[-1].start()
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait_until_stopped(0.0)


def test_a_killed_child_is_started_again_and_its_death_reported_at_once(make: Make, said: list[str]) -> None:
    deaths: list[int] = []
    child = make(FOREVER, deaths.append)
    wait_until(lambda: said == ["up"], 60, "the child to be up")
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: [child.check(), deaths][1], 60, "the death to be noticed")
    assert deaths == [first]
    wait_until(lambda: [child.check(), said.count("up") == 2][1], 60, "the child to be up again")
    assert child.pid != first
    assert "was killed by SIGKILL; restarting it" in said[1]


def test_pauses_grow_and_hope_ends(make: Make, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.child._DEATHS_ALLOWED", 3)
    monkeypatch.setattr("pipeline.child._FIRST_PAUSE", 0.01)
    child = make("print('last words'); raise SystemExit(7)")
    with pytest.raises(
        ChildFailed, match=r"exit code 7 and has ended 4 times within a minute; its last lines: .*last words"
    ) as caught:
        wait_until(lambda: child.check(), 60, "the end of hope")
    assert caught.value.exit_code == 1
    assert next(line for line in said if "restarting it" in line).endswith("restarting it")
    assert "in 0.0 s" in said[-2]


def test_a_child_that_lacks_a_module_is_given_up_at_once(make: Make, tmp_path: Path, said: list[str]) -> None:
    """Also one that ran before: no restart repairs its environment."""
    ran = tmp_path / "ran"
    child = make(
        f"from pathlib import Path\nif Path({str(ran)!r}).exists(): import no_such_module\n"
        f"Path({str(ran)!r}).touch(); raise SystemExit(7)"
    )
    with pytest.raises(ChildRefused, match=r"^the test process cannot run: ModuleNotFoundError: No module .*'$"):
        wait_until(lambda: child.check(), 60, "the refusal")
    assert [line for line in said if "restarting it" in line] == [
        "the test process ended with exit code 7; restarting it"
    ]


def test_a_child_whose_program_is_away_for_a_while_is_tried_again(tmp_path: Path, said: list[str]) -> None:
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text(f"#!{sys.executable}\n{FOREVER}")
    program.chmod(0o700)
    child = Child("test", lambda: [str(program)], {}, said.append)
    child.start()
    try:
        wait_until(lambda: said == ["up"], 60, "the child to be up")
        program.rename(away)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: [child.check(), len(said) == 4][1], 60, "two tries in vain")
        away.rename(program)
        wait_until(lambda: [child.check(), said[-1] == "up"][1], 60, "the child to be up again")
        failed = f"the test process could not be started ([Errno 2] No such file or directory: '{program}')"
        assert said[2:4] == [f"{failed}; trying again in 0.2 s", f"{failed}; trying again in 0.5 s"]
    finally:
        child.kill()
        child.wait_until_stopped(0.0)


def test_a_child_that_never_starts_again_is_given_up(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.child._DEATHS_ALLOWED", 3)
    monkeypatch.setattr("pipeline.child._FIRST_PAUSE", 0.01)
    child = Child("test", lambda: [str(tmp_path / "absent")], {}, said.append)
    with pytest.raises(OSError, match="absent"):
        child.start()
    child.start_or_retry()
    with pytest.raises(ChildFailed, match=r"could not be started \(.*absent'\) and has ended 4 times within a minute$"):
        wait_until(lambda: child.check(), 60, "the end of hope")


def test_a_child_without_a_thread_to_read_it_is_ended_and_tried_again(said: list[str]) -> None:
    child = Child("test", lambda: [sys.executable, "-c", FOREVER], {}, said.append)
    before = threading.stack_size(1 << 60)  # more than there are addresses, so that no thread starts
    try:
        child.start_or_retry()
    finally:
        threading.stack_size(before)
    assert said == ["the test process could not be started (can't start new thread); trying again"]
    assert child.pid is None
    assert not [pid for pid in descendants(os.getpid()) if FOREVER in command_line(pid)]
    try:
        wait_until(lambda: [child.check(), said[-1] == "up"][1], 60, "the child to be up")
    finally:
        child.kill()
        child.wait_until_stopped(0.0)


def test_a_child_that_is_to_start_later_is_not_started_before_nor_after_an_order_to_stop(said: list[str]) -> None:
    child = Child("test", lambda: [sys.executable, "-c", FOREVER], {}, said.append)
    child.start_later(600)
    child.check()
    assert child.pid is None
    child.start_later(0)
    child.check()
    assert child.pid is not None
    child.kill()
    child.wait_until_stopped(0.0)
    child = Child("test", lambda: [sys.executable, "-c", FOREVER], {}, said.append)
    child.start_later(0)
    child.ask_to_stop()
    child.wait_until_stopped(0.0)
    child.check()
    assert (child.pid, child.pause_left, child.has_stopped) == (None, None, True)


def test_a_refusal_is_not_tried_again(make: Make, said: list[str]) -> None:
    child = make("import sys; print('Error: no such model', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ChildFailed, match=r"^no such model$") as caught:
        wait_until(lambda: child.check(), 60, "the refusal")
    assert caught.value.exit_code == 2
    assert "no such model" not in "".join(said)


def test_a_child_that_does_not_end_is_killed_at_the_deadline_or_when_insisted(make: Make, said: list[str]) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    for options in ((time.monotonic() + 0.2,), (time.monotonic() + 600, lambda: True)):
        said.clear()
        child = make(stubborn)
        wait_until(lambda: said, 60, "the child to be up")
        child.ask_to_stop()
        child.wait_until_stopped(*options)
        assert child.pid is None


def test_an_insisting_order_reaches_the_child_of_a_process_that_ignores_it(make: Make, said: list[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = make(FOREVER)
        wait_until(lambda: said == ["up"], 60, "the child to be up")
    finally:
        signal.signal(signal.SIGINT, before)
    child.insist()
    child.wait_until_stopped(time.monotonic() + 60)
    assert child.stop_code == -signal.SIGINT


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from pipeline.child import Child; import sys, time\n"
        f"child = Child('test', lambda: [sys.executable, '-c', {FOREVER!r}], {{}}, lambda line: None)\n"
        "child.start(); print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid), 60, "the child to die")
    parent.stdout.close()


def test_a_folder_that_is_just_made_is_not_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command may look for abandoned folders before its owner holds it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flock = fcntl.flock

    def flock_late(lock: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            remove_abandoned()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with private_folder() as folder:
        remove_abandoned()
        assert os.listdir(folder) == ["owner.lock"]
    assert os.listdir(tmp_path) == []


def test_only_abandoned_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder() as held:
        abandoned = tmp_path / "pipeline-old"
        abandoned.mkdir()
        (abandoned / "owner.lock").touch()
        foreign = tmp_path / "pipeline-foreign"
        foreign.mkdir()
        remove_abandoned()
        assert sorted(tmp_path.iterdir()) == sorted([held, foreign])
        assert held.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [foreign]
