"""How much of this process' time each batch had lately."""

import time

_HALF_LIFE_SECONDS = 10.0
_MOST_REMEMBERED = 10_000


class ServedTime:
    """Seconds by batch, halved every ten seconds. Forgetting them costs some fairness and nothing
    else.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}  # seconds, and when they were counted

    def add(self, batch: str, seconds: float) -> None:
        """Count what a slice took."""
        if len(self._found) >= _MOST_REMEMBERED:
            self._found.clear()
        self._found[batch] = self.of(batch) + seconds, time.monotonic()

    def of(self, batch: str) -> float:
        """Return 0 for a batch that had none."""
        seconds, counted = self._found.get(batch, (0.0, 0.0))
        return float(seconds * 0.5 ** ((time.monotonic() - counted) / _HALF_LIFE_SECONDS))
