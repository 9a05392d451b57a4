"""What workers say of their engines and GPUs every few seconds, and how much waits: the numbers
behind `GET /metrics`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from jobs.protocol.requests import pack
from jobs.protocol.states import END_STATES
from jobs.queue import keys
from jobs.queue.base import QueueBase, text

GAUGES_SECONDS = 30
"""How long a worker's gauges are believed."""


class GpuGauges(msgspec.Struct, frozen=True):
    """Figures of one GPU as its driver reports them; None where it reports none."""

    name: str
    uuid: str
    busy: float | None = None  # share of the last moments in which something ran
    memory_used: int | None = None  # bytes
    memory_total: int | None = None  # bytes
    watts: float | None = None


class MetricDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """What a worker declares of one of its metrics."""

    name: str
    help: str
    kind: str  # counter, gauge or histogram; newer versions may have others
    label: str = ""  # besides those that name the worker
    buckets: list[float] = []


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """A value of a metric; of a histogram the sum, and how many observations each bucket has."""

    label: str
    value: float
    counts: list[int] = []


class WorkerGauges(msgspec.Struct, frozen=True):
    """One worker's engine. `tokens` are those generated in its life, the rest is the present.

    `metrics` has the samples of each metric that the worker's record declares, in that order; the
    numbers before it are what earlier versions read.
    """

    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    tokens: int
    tokens_per_second: float
    gpus: list[GpuGauges] = msgspec.field(default_factory=list, name="cards")
    metrics: list[list[MetricSample]] = []


@dataclass(frozen=True, slots=True)
class Depths:
    """Requests that wait for a worker, and batches."""

    live: dict[str, int]  # by model
    # By model; only those in the ready lists, which hold a window of each batch
    batch: dict[str, int]
    quarantined: dict[str, int]  # by model
    batches: dict[str, int]  # those that the control plane has work on, by state
    ended: dict[str, int]  # how many batches came to each end, since Redis was empty


class Gauges(QueueBase):
    """Part of `jobs.queue.request_queue.Queue`."""

    def report_gauges(self, worker: str, gauges: WorkerGauges) -> None:
        """Replace what the worker said before."""
        self._command("SET", keys.gauges(worker), pack(gauges), "EX", GAUGES_SECONDS)

    def gauges(self, workers: list[str]) -> dict[str, WorkerGauges]:
        """Of those that reported lately."""
        packed = self._command("MGET", *map(keys.gauges, workers)) if workers else []
        found = zip(workers, packed, strict=True)
        return {
            worker: msgspec.msgpack.decode(value, type=WorkerGauges) for worker, value in found if value is not None
        }

    def depths(self, models: list[str]) -> Depths:
        """How much waits, of live calls and quarantined requests for these models.

        Three round trips, and nothing is asked for a batch that ended.
        """
        ends = sorted(END_STATES)
        of_models = [command for model in models for command in _of_model(model)]
        active, ended, *counts = self.commands([["SMEMBERS", keys.ACTIVE], ["HMGET", keys.ENTERED, *ends], *of_models])
        batches = sorted(map(text, active))
        replies = self.commands([command for batch in batches for command in _of_batch(batch)])
        states = Counter(text(state) for state in replies[::2])
        lists = [
            (batch, model)
            for batch, members in zip(batches, replies[1::2], strict=True)
            for model in map(text, members)
        ]
        waiting: Counter[str] = Counter()
        live = Counter(dict(zip(models, counts[::3], strict=True)))
        in_turns = zip(models, counts[2::3], strict=True)
        places = [(waiting, model, keys.ready(batch, model)) for batch, model in lists]
        places += [(live, model, keys.live_of(model, text(one))) for model, tenants in in_turns for one in tenants]
        for (count, model, _), length in zip(places, self.commands(["LLEN", name] for *_, name in places), strict=True):
            count[model] += length
        return Depths(
            live=dict(live),
            batch={model: waiting[model] for model in {*models, *waiting}},
            quarantined=dict(zip(models, counts[1::3], strict=True)),
            batches={state: count for state, count in states.items() if state},
            ended={state: int(count or 0) for state, count in zip(ends, ended, strict=True)},
        )


def _of_model(model: str) -> list[list[Any]]:
    return [["LLEN", keys.live(model)], ["ZCARD", keys.quarantined(model)], ["ZRANGE", keys.live_tenants(model), 0, -1]]


def _of_batch(batch: str) -> list[list[str]]:
    return [["HGET", keys.batch(batch), "state"], ["SMEMBERS", keys.batch_models(batch)]]
