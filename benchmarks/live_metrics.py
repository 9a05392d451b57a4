"""The counters of a server's workers over time, read from its `/metrics`."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import httpx

from benchmarks.servers import Server

COMPUTED = "vllm:iteration_tokens_total_sum"
GENERATED = "vllm:generation_tokens_total"
ROWS, STEPS = "pipeline_step_rows_sum", "pipeline_step_rows_count"
STEP_SECONDS = "pipeline_step_seconds_sum"
_COUNTERS = frozenset({COMPUTED, GENERATED, ROWS, STEPS, STEP_SECONDS})
_REPORT_SECONDS, _POLL_SECONDS = 4.5, 0.1
"""Workers report every 5 s. After a report there is no scrape for most of that time, then there are
frequent ones, so that the time of the next report is precise.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """The counts between two times, in unix seconds."""

    begin: float
    end: float
    counted: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def rate(self, counter: str) -> float:
        """Return the count per second."""
        return self.counted[counter] / self.seconds

    def per_step(self, counter: str) -> float:
        return self.counted[counter] / max(1.0, self.counted[STEPS])


class MetricsRecorder:
    """A context in which a thread scrapes a server."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=60)
        self._reports: list[tuple[float, dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._scrape, daemon=True)

    def __enter__(self) -> "MetricsRecorder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def spans(self, begin: float, end: float) -> list[Span]:
        """Return a span for each two successive reports between `begin` and `end`."""
        reports = [report for report in self._reports if begin <= report[0] <= end]
        return [_between(*pair) for pair in pairwise(reports)]

    def whole(self, begin: float, end: float) -> Span:
        """Return one span from the first to the last report between `begin` and `end`.

        Raises RuntimeError if there are fewer than two.
        """
        reports = [report for report in self._reports if begin <= report[0] <= end]
        if len(reports) < 2:
            raise RuntimeError(f"workers reported {len(reports)} times in {end - begin:.0f} s: make the phases longer")
        return _between(reports[0], reports[-1])

    def _scrape(self) -> None:
        wait = 0.0
        while not self._ended.wait(wait):
            found = counters(self._client.get("/metrics").raise_for_status().text)
            changed = not self._reports or found != self._reports[-1][1]
            if changed:
                self._reports.append((time.time(), found))
            wait = _REPORT_SECONDS if changed and len(self._reports) > 1 else _POLL_SECONDS


def counters(text: str) -> dict[str, float]:
    """Return the sums of this module's counters over all workers, from Prometheus' text format."""
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in _COUNTERS:
            found[name] += float(line.rpartition(" ")[2])
    return dict(found)


def _between(first: tuple[float, dict[str, float]], last: tuple[float, dict[str, float]]) -> Span:
    counted = {name: last[1].get(name, 0.0) - first[1].get(name, 0.0) for name in _COUNTERS}
    return Span(first[0], last[0], counted)
