"""Processor time and memory of a process and its descendants, from /proc."""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.2


class ProcessorTime:
    """The processor time of each part of a run, sampled regularly, since processes may end.

    `roles` maps a word of the processes' command lines to the name of the part.
    """

    def __init__(self, pid: int, roles: Mapping[str, str]) -> None:
        self._pid = pid
        self._names = roles
        # Recorded at the first sample: an ending process has no command line
        self._roles: dict[int, str] = {}
        self._used: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin the measurement; processor time until now does not count."""
        self._before = self._look()

    def end(self) -> dict[str, float]:
        """Return seconds by part."""
        self._ended.set()
        self._thread.join()
        by_role: dict[str, float] = defaultdict(float)
        for pid, seconds in (self._used | self._look()).items():
            by_role[self._roles[pid]] += seconds - self._before.get(pid, 0.0)
        return {role: round(seconds, 2) for role, seconds in sorted(by_role.items())}

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._used |= self._look()

    def _look(self) -> dict[int, float]:
        used = {pid: own_cpu_seconds(pid) for pid in family(self._pid)}
        for pid in used.keys() - self._roles.keys():
            self._roles[pid] = self._role(pid)
        return {pid: seconds for pid, seconds in used.items() if seconds}

    def _role(self, pid: int) -> str:
        words = command_line(pid)
        return (
            "the command"
            if pid == self._pid
            else next((role for part, role in self._names.items() if part in words), "other")
        )


def family(pid: int) -> list[int]:
    """Return the process and its descendants; ending ones may be missing."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ended just now
                for child in (task / "children").read_text().split():
                    found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its running descendants."""
    return sum(map(own_cpu_seconds, family(pid)))


def own_cpu_seconds(pid: int) -> float:
    """Return the processor time of one process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return 0.0


def command_line(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def memory(pid: int) -> dict[str, int]:
    """Return bytes: the resident `peak`, the resident bytes now, and the anonymous part of them.

    Return {} for an ended process.
    """
    names = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous"}
    with contextlib.suppress(OSError):
        fields = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {names[name]: int(value.split()[0]) * 1024 for name, value in fields if name in names}
    return {}


def proportional_bytes(pid: int) -> int:
    """Return the proportional resident bytes (PSS) of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
