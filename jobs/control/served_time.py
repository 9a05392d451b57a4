"""The time of this process that each tenant, or each batch, used lately."""

import time

_HALF_LIFE_SECONDS = 10.0
_MOST_REMEMBERED = 10_000


class ServedTime:
    """Seconds by name, halved every ten seconds. Losing them costs only some fairness."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}  # seconds, and the time of the last count

    def add(self, name: str, seconds: float) -> None:
        """Add used time."""
        if len(self._found) >= _MOST_REMEMBERED:
            self._found.clear()
        self._found[name] = self.of(name) + seconds, time.monotonic()

    def of(self, name: str) -> float:
        """Return the time of a name; 0 for an unknown one."""
        seconds, counted = self._found.get(name, (0.0, 0.0))
        return float(seconds * 0.5 ** ((time.monotonic() - counted) / _HALF_LIFE_SECONDS))
