"""Turns: a few jobs of a process compute at a time, those of the least served tenant first.

Python runs one thread at a time, so each job that computes slows down all others. A job takes a
turn, and passes it on at its checks while others wait. One that comes to no check, since it waits
for a disk, is no longer counted; it waits for its next turn when it comes to one.
"""

import threading
import time
from dataclasses import dataclass, field

from jobs.control.served_time import ServedTime

AT_ONCE = 2
TURN_SECONDS = 0.02
OVERRUN_SECONDS = 0.1
"""After this time without a check a turn is not counted any more."""

_POLL_SECONDS = 0.05


@dataclass(eq=False)
class Turn:
    """A job's leave to compute, for the thread that took it."""

    tenant: str
    batch: str
    began: float = 0.0  # monotonic seconds
    granted: threading.Event = field(default_factory=threading.Event)

    @property
    def unchecked_seconds(self) -> float:
        """Return for how long the job has its turn without a check; 0 while it waits for one."""
        return time.monotonic() - self.began if self.granted.is_set() else 0.0


class Turns:
    """The turns of one process. Thread-safe."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._lock = threading.Lock()
        self._tenants, self._batches = ServedTime(), ServedTime()
        self._running: set[Turn] = set()
        self._waiting: list[Turn] = []

    def take(self, turn: Turn) -> None:
        """Wait until the turn is granted, which it is at once while the process stops."""
        with self._lock:
            self._waiting.append(turn)
            self._grant()
        self._wait_for(turn)

    def pass_on(self, turn: Turn) -> None:
        """Let others have a turn that lasted long enough, and wait for the next one."""
        if time.monotonic() - turn.began < TURN_SECONDS:
            return
        with self._lock:
            self._count(turn)
            if not self._waiting:
                turn.began = time.monotonic()
                return
            self._running.discard(turn)
            turn.granted.clear()
            self._waiting.append(turn)
            self._grant()
        self._wait_for(turn)

    def end(self, turn: Turn) -> None:
        """Give the turn up."""
        with self._lock:
            self._count(turn)
            self._running.discard(turn)
            self._grant()

    def served(self, tenant: str) -> float:
        """Return how much of this process' time a tenant had lately, in seconds."""
        return self._tenants.of(tenant)

    def _wait_for(self, turn: Turn) -> None:
        while not turn.granted.wait(_POLL_SECONDS):
            with self._lock:
                self._grant()  # one that runs may have overrun meanwhile

    def _grant(self) -> None:
        now = time.monotonic()
        free = AT_ONCE - sum(now - turn.began < OVERRUN_SECONDS for turn in self._running)
        while self._waiting and (free > 0 or self._stopping.is_set()):
            turn = min(self._waiting, key=self._served_of)
            self._waiting.remove(turn)
            turn.began = now
            self._running.add(turn)
            turn.granted.set()
            free -= 1

    def _served_of(self, turn: Turn) -> tuple[float, float]:
        return self._tenants.of(turn.tenant), self._batches.of(turn.batch)

    def _count(self, turn: Turn) -> None:
        seconds = min(time.monotonic() - turn.began, OVERRUN_SECONDS)
        self._tenants.add(turn.tenant, seconds)
        self._batches.add(turn.batch, seconds)
