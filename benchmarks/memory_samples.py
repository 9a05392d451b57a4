"""The memory of a process and its descendants during a run, by part.

The figures of each part, and of Redis' own report, are the peak and the medians of the third and of
the last fifth of the run. A process that starts late has no figure for the third. `resident` counts
shared memory in each process; `own` divides it among them, as PSS does. If a part has several
processes, the largest counts.
"""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.processes import command_line, family, memory, proportional_bytes
from jobs.queue.connection import connect

REDIS = "Redis"
"""The part of the Redis server, which also reports its own figure."""

_LOOK_SECONDS = 0.5
_THIRD, _LAST = (0.4, 0.6), (0.8, 1.0)


class MemorySamples:
    """Samples regularly from its creation until `end`.

    `roles` maps a word of the processes' command lines to the name of the part.
    """

    def __init__(self, pid: int, roles: Mapping[str, str]) -> None:
        self._pid = pid
        self._roles = roles
        self._samples: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, dict[str, float]]:
        """Return megabytes by part and kind: `peak`, and `third` and `last` if they are known."""
        self._ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._began
        return {name: _levels(values, seconds) for name, values in sorted(self._samples.items())}

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic() - self._began
            for name, size in self._look().items():
                self._samples[name].append((now, size))

    def _look(self) -> dict[str, int]:
        most: dict[str, int] = defaultdict(int)
        for pid in family(self._pid):
            words = command_line(pid)
            role = next((role for part, role in self._roles.items() if part in words), "other")
            sizes = {"resident": memory(pid).get("resident", 0), "own": proportional_bytes(pid)}
            if role == REDIS:
                sizes["used_memory"] = _redis_bytes(words)
            for kind, size in sizes.items():
                most[f"{role}, {kind}"] = max(most[f"{role}, {kind}"], size)
        return most


def _redis_bytes(words: str) -> int:
    """Return the memory that the server of a command line reports; 0 without an answer."""
    found = re.search(r"unixsocket:(\S+)", words)
    try:
        info: Any = connect(f"unix://{found[1]}").info("memory") if found else {"used_memory": 0}
    except Exception:
        return 0
    return int(info["used_memory"])


def _levels(values: list[tuple[float, int]], seconds: float) -> dict[str, float]:
    levels = {"peak": megabytes(max(size for _, size in values))}
    for name, (first, last) in {"third": _THIRD, "last": _LAST}.items():
        if there := [size for when, size in values if first * seconds <= when <= last * seconds]:
            levels[name] = megabytes(median(there))
    return levels


def megabytes(size: float) -> float:
    """Return a size in millions of bytes."""
    return round(size / 1e6, 1)
