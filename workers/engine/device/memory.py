"""How much memory this process may still take, of a machine and of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What becomes of a GPU's memory before there is a KV cache; all but the first two in
    bytes.
    """

    gpu: str
    utilization: float  # of the whole, what this replica may use
    total: int
    taken: int  # by others, and by the driver
    weights: int
    step: int  # the largest step, and what is kept by slot
    graphs: int

    @property
    def left(self) -> int:
        """For the KV cache; below 0 where even the rest does not fit."""
        return int(self.total * self.utilization) - self.taken - self.weights - self.step - self.graphs

    @property
    def account(self) -> str:
        """The beginning of a sentence that says what is left."""
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
    """Return bytes that the machine and the container's limit leave, whichever is fewer; None where
    neither says.
    """
    known = [size for size in (_machine(_MEMINFO), _container(_CGROUP)) if size is not None]
    return min(known, default=None)


def gib(size: int) -> str:
    """Return a size as a person reads it."""
    return f"{size / 2**30:.2f} GiB"


def _machine(meminfo: Path) -> int | None:
    return _field(meminfo, "MemAvailable:", 1024)


def _container(cgroup: Path) -> int | None:
    """Return what the limit leaves; files that are only cached can be dropped, so they count as
    free.
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
