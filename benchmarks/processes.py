"""What /proc says of a process and of all below it: processor time and memory."""

import contextlib
import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


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
