"""Rates of batches and of the fleet, computed from several samples."""

from pipeline.progress import Counts, Rate
from pipeline.top.sample import Sample


class Rates:
    """Rates over the last ten seconds; a batch that left the samples is forgotten."""

    def __init__(self) -> None:
        self._batches: dict[str, Rate] = {}
        self._requests = Rate()

    def add(self, sample: Sample) -> None:
        self._batches = {batch.id: self._batches.get(batch.id) or Rate() for batch in sample.batches}
        for batch in sample.batches:
            counts = Counts(total=batch.status.total, done=batch.status.finished)
            self._batches[batch.id].add(counts, sample.taken)
        # `running=1` gives an idle fleet a rate too
        self._requests.add(Counts(done=sample.fleet.requests_ended, running=1), sample.taken)

    @property
    def requests_per_second(self) -> float | None:
        return self._requests.done_per_second

    def lines_per_second(self, batch: str) -> float | None:
        return self._batches[batch].done_per_second

    def seconds_left(self, batch: str) -> float | None:
        return self._batches[batch].seconds_left
