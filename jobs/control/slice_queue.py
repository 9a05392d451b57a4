"""Slice queue: the batches of a process that wait for a slice, and the next one to start.

A tenant has several slices at once, more than compute, since slices wait for disks. Stuck slices do
not count against the others, up to a limit of their own. Validations of large inputs are few,
because of their memory, stuck or not.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.control.turns import Turn

MOST_SMALL = 256
MOST_LARGE = 8
MOST_OF_TENANT = {False: 16, True: 4}
"""Limits for small slices, and for large ones."""
MOST_STUCK_OF_TENANT = 64
STUCK_SECONDS = 2.0
"""A slice is stuck after this long without a check."""


@dataclass(eq=False)
class Driven:
    """A batch that this process drives."""

    batch: str
    tenant: str
    is_large: bool = False
    """Its next slice validates a large input."""
    is_waiting: bool = False
    """Whether it waits for a slice to start."""
    is_wanted: bool = False
    """Whether another slice follows the running one."""
    is_stuck: bool = False
    turn: Turn | None = None
    """The turn of the running slice."""
    pause: float = 0.0
    """Seconds after the last failure."""
    not_before: float = 0.0
    """Earliest time of the next look that may request a slice, monotonic seconds."""


@dataclass
class _Group:
    """The slices of a tenant, large or small."""

    waiting: deque[Driven] = field(default_factory=deque)  # in the order of their requests
    running: int = 0  # without stuck ones
    stuck: int = 0


class SliceQueue:
    """The slices of a process by tenant. Not thread-safe."""

    def __init__(self, served: Callable[[str], float]) -> None:
        self.running: set[Driven] = set()
        self._served = served
        self._groups: dict[tuple[str, bool], _Group] = {}
        self._totals = {False: 0, True: 0}  # running slices that are not stuck

    def ask_for(self, driven: Driven) -> None:
        """Request a slice; it starts after the running one if there is one."""
        if driven in self.running:
            driven.is_wanted = True
        elif not driven.is_waiting:
            driven.is_waiting = True
            self._group(driven).waiting.append(driven)

    def begin_next(self) -> Driven | None:
        """Return the next batch whose slice may start, and count it as running."""
        able = [key for key, group in self._groups.items() if group.waiting and self._has_room(key, group)]
        if not able:
            return None
        key = min(able, key=lambda key: self._served(key[0]))
        driven = self._groups[key].waiting.popleft()
        driven.is_waiting = driven.is_wanted = False
        self.running.add(driven)
        self._groups[key].running += 1
        self._totals[driven.is_large] += 1
        return driven

    def end(self, driven: Driven) -> None:
        """Count a slice as ended."""
        group = self._group(driven)
        if driven.is_stuck:
            group.stuck -= 1
        else:
            group.running -= 1
            self._totals[driven.is_large] -= 1
        self._tidy(driven)
        self.running.remove(driven)
        driven.is_stuck, driven.turn = False, None

    def note_stuck(self) -> list[Driven]:
        """Return the small slices that became stuck."""
        found = []
        for driven in self.running:
            if driven.is_stuck or driven.is_large or driven.turn is None:
                continue
            if driven.turn.unchecked_seconds > STUCK_SECONDS:
                driven.is_stuck = True
                group = self._group(driven)
                group.running, group.stuck = group.running - 1, group.stuck + 1
                self._totals[False] -= 1
                found.append(driven)
        return found

    def make_small(self, driven: Driven) -> None:
        """Record that a batch without a running slice has no large input to validate any more."""
        if driven.is_waiting:
            self._group(driven).waiting.remove(driven)
        self._tidy(driven)
        driven.is_large = False
        if driven.is_waiting:
            self._group(driven).waiting.append(driven)

    def _group(self, driven: Driven) -> _Group:
        return self._groups.setdefault((driven.tenant, driven.is_large), _Group())

    def _tidy(self, driven: Driven) -> None:
        group = self._group(driven)
        if not (group.running or group.stuck or group.waiting):
            del self._groups[driven.tenant, driven.is_large]

    def _has_room(self, key: tuple[str, bool], group: _Group) -> bool:
        most = MOST_LARGE if key[1] else MOST_SMALL
        is_stuck = group.stuck >= MOST_STUCK_OF_TENANT
        return not is_stuck and self._totals[key[1]] < most and group.running < MOST_OF_TENANT[key[1]]
