"""Finding and watching processes by their id, as /proc has them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.waiting import wait_until


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents before children; those that end meanwhile may be
    missing.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread that ended just now; its children went over to another
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found + [below for child in found for below in descendants(child)]


def command_line(pid: int) -> str:
    """The words a process was started with; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environment_of(pid: int) -> list[str]:
    """Return the variables a process was started with, as NAME=value."""
    # A program that has just been started has none for a moment.
    found = wait_until(Path(f"/proc/{pid}/environ").read_bytes, 60, f"the environment of {pid}")
    return found.decode(errors="replace").split("\0")


def wake_ups(pids: Iterable[int]) -> int:
    """How often threads of these processes have waited for something."""
    tasks = (status for pid in pids for status in Path(f"/proc/{pid}/task").glob("*/status"))
    lines = (line.split() for status in tasks for line in status.read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] == "voluntary_ctxt_switches:")


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be noted as ended."""
    try:
        return (
            os.readlink(f"/proc/{pid}/exe") != ""
            and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, as it has not while it starts."""
    try:
        caught = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")
        )
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each of these processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_rest(pids: Sequence[int], share: float, seconds: float = 3.0) -> None:
    """Until these processes have used no more than `share` of a core each over so many seconds, as
    they do when nothing is left to do.
    """

    def rest() -> bool:
        began, before = time.monotonic(), [cpu_seconds(pid) for pid in pids]
        time.sleep(seconds)  # what is measured is this very time
        used = [cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
        print({command_line(pid): spent for pid, spent in zip(pids, used, strict=True)})
        return max(used) <= share * (time.monotonic() - began) + 1 / os.sysconf("SC_CLK_TCK")

    wait_until(rest, 60, "processes to rest")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(folder: Path) -> int:
    """How many files of this folder the process has open; others come and go, with the connections
    of earlier tests for one.
    """
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
    return found
