"""Memory use of processes and their descendants, from /proc."""

from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")


def memory_of(pids: Iterable[int]) -> int | None:
    """Return the bytes of processes and their descendants; a shared page counts once.

    Return None if the kernel does not report them.
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
    """Return a process's proportional memory: 0 if it ended, None if it may not be read."""
    try:
        rows = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if (_PROC / "self" / "smaps_rollup").exists() else None
    except OSError:
        return None
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")), None)
