"""Turns: a few jobs of a process compute at a time, those of the least served tenant first.

Python runs one thread at a time, so each computing job slows down all others. A job takes a turn,
and passes it on at its checks while others wait. A job without a check, since it waits for a disk
or for Redis, soon stops counting; at its next check it waits for another turn.
"""

import threading
import time
from dataclasses import dataclass, field

from jobs.control.served_time import ServedTime

AT_ONCE = 4
LONG_AT_ONCE = 2
LONG_SECONDS = 0.1
"""A slice is long after this much computing. Shorter ones mostly wait for Redis and disks."""
TURN_SECONDS = 0.02
OVERRUN_SECONDS = 0.1
"""A turn no longer counts after this long without a check."""

_POLL_SECONDS = 0.03
_WAITED_SHARE = 0.1  # share of waiting time that offsets served time


@dataclass(eq=False)
class Turn:
    """A job's permission to compute, for the thread that took it."""

    tenant: str
    batch: str
    began: float = 0.0  # monotonic seconds; while it waits, the start of the wait
    used: float = 0.0  # seconds
    granted: threading.Event = field(default_factory=threading.Event)

    @property
    def is_long(self) -> bool:
        """Return whether the slice has computed for long."""
        return self.used >= LONG_SECONDS

    @property
    def unchecked_seconds(self) -> float:
        """Return how long the job has its turn without a check; 0 while it waits for one."""
        return time.monotonic() - self.began if self.granted.is_set() else 0.0


class Turns:
    """The turns of one process. Thread-safe."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._lock = threading.Lock()
        self._tenants, self._batches = ServedTime(), ServedTime()
        self._running: set[Turn] = set()
        self._waiting: list[Turn] = []
        self._asked = threading.Event()  # set if jobs may be waiting

    def take(self, turn: Turn) -> None:
        """Wait until the turn is granted; it is granted at once while the process stops."""
        with self._lock:
            self._ask(turn)
        turn.granted.wait()

    def pass_on(self, turn: Turn) -> None:
        """Pass on a turn that lasted long enough, and wait for the next one."""
        if time.monotonic() - turn.began < TURN_SECONDS:
            return
        with self._lock:
            self._count(turn)
            if not self._waiting:
                turn.began = time.monotonic()
                return
            self._running.discard(turn)
            turn.granted.clear()
            self._ask(turn)
        turn.granted.wait()

    def end(self, turn: Turn) -> None:
        """End the turn."""
        with self._lock:
            self._count(turn)
            self._running.discard(turn)
            self._grant()

    def served(self, tenant: str) -> float:
        """Return the time of this process that a tenant used lately, in seconds."""
        return self._tenants.of(tenant)

    def count(self, tenant: str, seconds: float) -> None:
        """Add a tenant's use outside its turns."""
        with self._lock:
            self._tenants.add(tenant, seconds)

    def watch(self) -> None:
        """Grant turns in place of overrunning ones, until the process stops; the body of a
        thread.
        """
        while not self._stopping.is_set():
            self._asked.wait()
            time.sleep(_POLL_SECONDS)
            self.grant()

    def grant(self) -> None:
        """Grant the turns that may be granted now: all of them, once the process stops."""
        with self._lock:
            self._grant()

    def _ask(self, turn: Turn) -> None:
        turn.began = time.monotonic()
        self._waiting.append(turn)
        self._grant()

    def _grant(self) -> None:
        while able := self._grantable():
            turn = min(able, key=self._served_of)
            self._waiting.remove(turn)
            turn.began = time.monotonic()
            self._running.add(turn)
            turn.granted.set()
        (self._asked.set if self._waiting or self._stopping.is_set() else self._asked.clear)()

    def _grantable(self) -> list[Turn]:
        if self._stopping.is_set():
            return list(self._waiting)
        now = time.monotonic()
        counted = [turn for turn in self._running if now - turn.began < OVERRUN_SECONDS]
        if len(counted) >= AT_ONCE:
            return []
        may_be_long = sum(turn.is_long for turn in counted) < LONG_AT_ONCE
        return [turn for turn in self._waiting if may_be_long or not turn.is_long]

    def _served_of(self, turn: Turn) -> tuple[float, float]:
        waited = _WAITED_SHARE * (time.monotonic() - turn.began)  # so that new batches do not always go first
        return self._tenants.of(turn.tenant), self._batches.of(turn.batch) - waited

    def _count(self, turn: Turn) -> None:
        seconds = min(time.monotonic() - turn.began, OVERRUN_SECONDS)
        self._tenants.add(turn.tenant, seconds)
        self._batches.add(turn.batch, seconds)
        turn.used += seconds
