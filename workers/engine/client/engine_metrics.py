"""Track the metrics that `Stats` declares, from the messages of one core."""

from copy import deepcopy
from typing import get_type_hints

from workers.engine.messages.core import Stats
from workers.engine.messages.metrics import Counter, Histogram


class EngineMetrics:
    """Metric values over the life of one engine core."""

    def __init__(self) -> None:
        self._latest = Stats()
        self._metrics: dict[str, Counter] = {
            field: deepcopy(hint.__metadata__[0])
            for field, hint in get_type_hints(Stats, include_extras=True).items()
            if hasattr(hint, "__metadata__")
        }
        self._histograms = [(field, one) for field, one in self._metrics.items() if isinstance(one, Histogram)]

    def record(self, stats: Stats) -> None:
        """Add one message of the core; each counts once."""
        self._latest = stats
        for field, histogram in self._histograms:
            for value, label in getattr(stats, field):
                histogram.observe(value, label)

    def all(self) -> list[Counter]:
        """Return the metrics with their current values."""
        for field, metric in self._metrics.items():
            if not isinstance(metric, Histogram):
                metric.values[""] = getattr(self._latest, field)
        return list(self._metrics.values())
