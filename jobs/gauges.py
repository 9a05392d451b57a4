"""What workers say of their engines and cards every few seconds, and how long everything waits: the numbers behind `GET /metrics`."""

from collections import Counter
from dataclasses import dataclass

import msgspec

from jobs import keys
from jobs.base import QueueBase, text
from jobs.requests import pack

GAUGES_SECONDS = 30
"""How long a worker's gauges are believed."""


class CardGauges(msgspec.Struct, frozen=True):
    """One GPU, as its driver tells; None where it does not."""

    name: str
    uuid: str
    busy: float | None = None  # share of the last moments in which something ran
    memory_used: int | None = None  # bytes
    memory_total: int | None = None  # bytes
    watts: float | None = None


class WorkerGauges(msgspec.Struct, frozen=True):
    """One worker's engine. `tokens` are those generated in its life, the rest is the present."""

    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    tokens: int
    tokens_per_second: float
    cards: list[CardGauges] = []


@dataclass(frozen=True, slots=True)
class Depths:
    """Requests that wait for a worker."""

    live: dict[str, int]  # by model
    batch: dict[str, int]  # by model; only those in the ready lists, which hold a window of each batch
    suspects: dict[str, int]  # by model
    batches: dict[str, int]  # how many batches there are, by state


class Gauges(QueueBase):
    """Part of `jobs.queue.Queue`."""

    def report_gauges(self, worker: str, gauges: WorkerGauges) -> None:
        """Replaces what the worker said before."""
        self._command("SET", keys.gauges(worker), pack(gauges), "EX", GAUGES_SECONDS)

    def gauges(self, workers: list[str]) -> dict[str, WorkerGauges]:
        """Of those that reported lately."""
        packed = self._command("MGET", *map(keys.gauges, workers)) if workers else []
        found = zip(workers, packed, strict=True)
        return {worker: msgspec.msgpack.decode(value, type=WorkerGauges) for worker, value in found if value is not None}

    def depths(self, models: list[str], batches: list[str]) -> Depths:
        """How much waits, for these models and batches."""
        states = Counter(text(self._command("HGET", keys.batch(batch), "state")) for batch in batches)
        waiting: Counter[str] = Counter()
        for batch in batches:
            for model in map(text, self._command("SMEMBERS", keys.batch_models(batch))):
                waiting[model] += int(self._command("LLEN", keys.ready(batch, model)))
        return Depths(
            live={model: int(self._command("LLEN", keys.live(model))) for model in models},
            batch={model: waiting[model] for model in {*models, *waiting}},
            suspects={model: int(self._command("ZCARD", keys.suspects(model))) for model in models},
            batches={state: count for state, count in states.items() if state},
        )
