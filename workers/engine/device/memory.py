"""The memory available to this process, on the machine and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The use of a GPU's memory before the KV cache is allocated; all but the first two fields are
    in bytes.
    """

    gpu: str
    utilization: float  # the part of the total that this replica may use
    total: int
    taken: int  # by other processes and the driver
    weights: int
    step: int  # the largest step, and the state of the slots
    graphs: int

    @property
    def left(self) -> int:
        """Return the bytes for the KV cache; negative if even the rest does not fit."""
        return int(self.total * self.utilization) - self.taken - self.weights - self.step - self.graphs

    @property
    def account(self) -> str:
        """Return the beginning of a sentence about the use of the memory."""
        usable = (
            f"--gpu-memory-utilization {self.utilization:g} makes {gib(int(self.total * self.utilization))} of them"
            " usable"
        )
        parts = (
            f"{gib(self.taken)} are taken already, the weights take {gib(self.weights)}, the largest step"
            f" {gib(self.step)}"
        )
        left = f"leaves {gib(self.left)}" if self.left > 0 else f"is {gib(-self.left)} too much"
        return f"{self.gpu} has {gib(self.total)}, {usable}; {parts} and CUDA graphs {gib(self.graphs)}, which {left}"


def available_memory() -> int | None:
    """Return the free bytes of the machine or of the container's limit, whichever is fewer.

    None if neither is known.
    """
    known = [size for size in (_machine(_MEMINFO), _container(_CGROUP)) if size is not None]
    return min(known, default=None)


def gib(size: int) -> str:
    """Return a size in GiB as text."""
    return f"{size / 2**30:.2f} GiB"


def _machine(meminfo: Path) -> int | None:
    return _field(meminfo, "MemAvailable:", 1024)


def _container(cgroup: Path) -> int | None:
    """Return the free bytes under the limit; the page cache counts as free, since it can be
    dropped.
    """
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + (_field(cgroup / "memory.stat", "inactive_file", 1) or 0))


def _field(file: Path, name: str, unit: int) -> int | None:
    try:
        rows = (line.split() for line in file.read_text().splitlines())
        return next((int(row[1]) * unit for row in rows if row and row[0] == name), None)
    except OSError:
        return None
