"""How much memory processes take, with all that they started, as /proc has it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")


def memory_of(pids: Iterable[int]) -> int | None:
    """Return bytes, in which a page that several processes have counts once; None where the kernel
    does not say.
    """
    sizes = [_proportional(one) for pid in pids for one in _tree(pid)]
    return None if None in sizes else sum(filter(None, sizes)) or None


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in _PROC.glob(f"{pid}/task/*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # a thread that has ended
            continue
        for child in found:
            yield from _tree(int(child))


def _proportional(pid: int) -> int | None:
    """Return 0 for a process that has ended, None for one that may not be read."""
    try:
        rows = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if (_PROC / "self" / "smaps_rollup").exists() else None
    except OSError:
        return None
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")), None)
