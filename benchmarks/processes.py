"""What /proc says of a process and of all below it: processor time and memory."""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.2


class ProcessorTime:
    """Processor time that each part of a run uses, looked at now and then, since its processes are
    gone at its end.

    `roles` name the parts by a word of their processes' command lines.
    """

    def __init__(self, pid: int, roles: Mapping[str, str]) -> None:
        self._pid = pid
        self._names = roles
        # As first seen: a process that ends has no command line any more
        self._roles: dict[int, str] = {}
        self._used: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """What was used until now does not count."""
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
    """Return the process and every one below it; those that end meanwhile may be missing."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ended just now
                for child in (task / "children").read_text().split():
                    found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of the process and of those below it that run."""
    return sum(map(own_cpu_seconds, family(pid)))


def own_cpu_seconds(pid: int) -> float:
    """Processor time of one process; 0 for one that is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return 0.0


def command_line(pid: int) -> str:
    """Return the words that it was started with; empty for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def memory(pid: int) -> dict[str, int]:
    """Return bytes: the most that ever was resident (`peak`), what is now, and of that what belongs
    to no file; nothing for one that is gone.
    """
    names = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous"}
    with contextlib.suppress(OSError):
        fields = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {names[name]: int(value.split()[0]) * 1024 for name, value in fields if name in names}
    return {}


def proportional_bytes(pid: int) -> int:
    """Return resident bytes, of which those that several processes share are divided among them; 0
    for one that is gone.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
