"""Counters, gauges and histograms: their names in Prometheus, and their values.

A metric is declared as the annotation of a field of `Stats`, or in `workers/replica/metrics.py`.
The worker publishes the declarations with its registration and the values with its reports; the API
shows them all. A metric with the meaning of one of vLLM's has the same name and buckets.
"""

from bisect import bisect_left
from collections.abc import Iterable

Sample = tuple[str, float] | tuple[str, float, list[int]]
"""The label's value ("" without a label), then the number. For a histogram: the sum, then the
number of observations per bucket; the last bucket has no bound.
"""

KINDS = ("live", "batch")
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class Counter:
    """A total for each value of one label."""

    kind = "counter"
    buckets: tuple[float, ...] = ()

    def __init__(self, name: str, help: str, label: str = "", values: Iterable[str] = ()) -> None:
        """Start at 0; `values` of the label are shown from the start."""
        self.name, self.help, self.label = name, help, label
        self.values = dict.fromkeys(values if label else ("",), 0.0)

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0.0) + amount

    def samples(self) -> list[Sample]:
        return list(self.values.items())


class Gauge(Counter):
    """A current value."""

    kind = "gauge"

    def set(self, value: float) -> None:
        self.values[""] = value


class Histogram(Counter):
    """Numbers of observations per bucket; the `values` of `Counter` are the sums."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, buckets: tuple[float, ...], label: str = "", values: Iterable[str] = ()
    ) -> None:
        """Start at 0; `buckets` are inclusive upper bounds in ascending order."""
        super().__init__(name, help, label, values)
        self.buckets = buckets
        self._counts = {value: [0] * (len(buckets) + 1) for value in self.values}

    def observe(self, value: float, label: str = "", count: int = 1) -> None:
        """Record `count` observations of the same value."""
        self._counts[label][bisect_left(self.buckets, value)] += count
        self.values[label] += value * count

    def samples(self) -> list[Sample]:
        return [(label, total, self._counts[label].copy()) for label, total in self.values.items()]
