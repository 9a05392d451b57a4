"""The number of workers that a model needs."""

from collections import deque


class Scale:
    """Grows at once with the requests, and shrinks when fewer workers were enough for a while."""

    def __init__(self, lowest: int, highest: int, requests_per_worker: int, quiet_seconds: float) -> None:
        self._lowest, self._highest = lowest, highest
        self._each = requests_per_worker
        self._quiet_seconds = quiet_seconds
        self._needed: deque[tuple[float, int]] = deque()  # (time, workers) with falling numbers

    def target(self, requests: int, now: float) -> int:
        """Return the most workers that were needed within the last `quiet_seconds`."""
        self.note(max(-(-requests // self._each), self._lowest), now)
        while now - self._needed[0][0] > self._quiet_seconds:
            self._needed.popleft()
        return self._needed[0][1]

    def note(self, workers: int, now: float) -> None:
        """Record that `workers` are needed now; the highest allowed number limits them."""
        workers = min(workers, self._highest)
        while self._needed and self._needed[-1][1] <= workers:
            self._needed.pop()
        self._needed.append((now, workers))
