"""How much of this process' time each tenant, or each batch, had lately."""

import time

_HALF_LIFE_SECONDS = 10.0
_MOST_REMEMBERED = 10_000


class ServedTime:
    """Seconds by name, halved every ten seconds. Forgetting them costs some fairness and nothing
    else.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}  # seconds, and when they were counted

    def add(self, name: str, seconds: float) -> None:
        """Count what was used."""
        if len(self._found) >= _MOST_REMEMBERED:
            self._found.clear()
        self._found[name] = self.of(name) + seconds, time.monotonic()

    def of(self, name: str) -> float:
        """Return 0 for a name that had none."""
        seconds, counted = self._found.get(name, (0.0, 0.0))
        return float(seconds * 0.5 ** ((time.monotonic() - counted) / _HALF_LIFE_SECONDS))
