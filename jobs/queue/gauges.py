"""Gauges that workers report of their engines and GPUs, and queue depths, for `GET /metrics`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from jobs.protocol.requests import pack
from jobs.protocol.states import END_STATES, MAY_EXPIRE
from jobs.queue import keys
from jobs.queue.base import QueueBase, text
from jobs.queue.batch_fields import RISKS, BatchFields

GAUGES_SECONDS = 30
"""How long a worker's gauges count as current."""


class GpuGauges(msgspec.Struct, frozen=True):
    """Figures of one GPU from its driver; None where the driver reports none."""

    name: str
    uuid: str
    busy: float | None = None  # share of the last moments in which a kernel ran
    memory_used: int | None = None  # bytes
    memory_total: int | None = None  # bytes
    watts: float | None = None


class MetricDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """A worker's declaration of one of its metrics."""

    name: str
    help: str
    kind: str  # counter, gauge or histogram; newer versions may have others
    label: str = ""  # in addition to those that name the worker
    buckets: list[float] = []


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """A value of a metric; for a histogram the sum, and the count of each bucket."""

    label: str
    value: float
    counts: list[int] = []


class WorkerGauges(msgspec.Struct, frozen=True):
    """Current figures of one worker's engine.

    `metrics` has the samples of each metric that the worker's record declares, in that order.
    """

    running: int
    waiting: int
    tokens_per_second: float
    gpus: list[GpuGauges] = []
    metrics: list[list[MetricSample]] = []


_decode = msgspec.msgpack.Decoder(WorkerGauges).decode


@dataclass(frozen=True, slots=True)
class Depths:
    """Numbers of requests that wait for a worker, and of batches."""

    live: dict[str, int]  # by model
    # By model; counts only the ready lists, which hold a window of each batch.
    batch: dict[str, int]
    quarantined: dict[str, int]  # by model
    batches: dict[str, int]  # batches that the control plane has work on, by state
    at_risk: dict[str, int]  # batches in progress by risk (`BatchStatus.risk`)
    ended: dict[str, int]  # batches by end state, since Redis was empty
    # Seconds by model, without models that nothing waits for: since the oldest live call was
    # submitted, and since the oldest batch with lines in the ready lists was created.
    oldest_live: dict[str, float]
    oldest_batch: dict[str, float]


class Gauges(QueueBase):
    """Part of `jobs.queue.request_queue.Queue`."""

    def report_gauges(self, worker: str, gauges: WorkerGauges) -> None:
        """Replace the worker's last report."""
        self._command("SET", keys.gauges(worker), pack(gauges), "EX", GAUGES_SECONDS)

    def gauges(self, workers: list[str]) -> dict[str, WorkerGauges]:
        """Return the gauges of those workers that reported lately."""
        packed = self._command("MGET", *map(keys.gauges, workers)) if workers else []
        found = zip(workers, packed, strict=True)
        return {worker: _decode(value) for worker, value in found if value is not None}

    def depths(self, models: list[str]) -> Depths:
        """Return the queue's depths; live calls and quarantined requests count for these models.

        Takes up to five round trips; ended batches are not read.
        """
        ends = sorted(END_STATES)
        of_models = [command for model in models for command in _of_model(model)]
        active, ended, *counts = self.commands([["SMEMBERS", keys.ACTIVE], ["HMGET", keys.ENTERED, *ends], *of_models])
        batches = sorted(map(text, active))
        replies = self.commands([command for batch in batches for command in _of_batch(batch)])
        states = Counter(text(state) for state, *_ in replies[::2])
        risks = Counter(text(risk) for state, _, risk in replies[::2] if state == b"in_progress" and risk)
        lists = [
            _WaitingList("batch", model, keys.ready(batch, model), created)
            for batch, (_, created, _), members in zip(batches, replies[::2], replies[1::2], strict=True)
            for model in map(text, members)
        ]
        lists += [_WaitingList("live", model, keys.live(model)) for model in models]
        in_turns = zip(models, counts[1::2], strict=True)
        lists += [
            _WaitingList("live", model, keys.live_of(model, text(one)))
            for model, tenants in in_turns
            for one in tenants
        ]
        lengths = self.commands(["LLEN", one.key] for one in lists)
        waiting = {kind: Counter(dict.fromkeys(models, 0)) for kind in ("live", "batch")}
        for one, length in zip(lists, lengths, strict=True):
            waiting[one.kind][one.model] += length
        ages = self._ages([one for one, length in zip(lists, lengths, strict=True) if length])
        return Depths(
            live=dict(waiting["live"]),
            batch=dict(waiting["batch"]),
            quarantined=dict(zip(models, counts[::2], strict=True)),
            batches={state: count for state, count in states.items() if state},
            at_risk={risk: risks[risk] for risk in RISKS},
            ended={state: int(count or 0) for state, count in zip(ends, ended, strict=True)},
            oldest_live=ages["live"],
            oldest_batch=ages["batch"],
        )

    def unfinished(self, models: list[str]) -> dict[str, int]:
        """Return the number of live calls waiting and of batch lines without a result, by model.

        Includes lines that are not in Redis yet. Takes up to three round trips. Lines of a batch
        with several models count for each in equal parts.
        """
        of_models = [command for model in models for command in _of_model(model)]
        active, *counts = self.commands([["SMEMBERS", keys.ACTIVE], *of_models])
        calls = [(model, keys.live(model)) for model in models]
        for model, tenants in zip(models, counts[1::2], strict=True):
            calls += [(model, keys.live_of(model, text(one))) for one in tenants]
        names = ("state", "open", "total", "completed", "failed", "line_models", "early")
        batches = [["HMGET", keys.batch(text(one)), *names] for one in active]
        replies = self.commands([*(["LLEN", key] for _, key in calls), *batches])
        found = Counter(dict(zip(models, counts[::2], strict=True)))
        for (model, _), length in zip(calls, replies, strict=False):
            found[model] += length
        records = [BatchFields.read(names, row) for row in replies[len(calls) :]]
        named = zip(map(text, active), records, strict=True)
        early = [batch for batch, one in named if one.state == "validating" and one.early]
        planned = [(one.total - one.finished, one.line_models) for one in records if one.state in MAY_EXPIRE]
        for lines, line_models in [*planned, *self._early_lines(early)]:
            for model in line_models:
                found[model] += -(-max(0, lines) // len(line_models))
        return {model: found[model] for model in models}

    def _early_lines(self, batches: list[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of unfinished lines of each batch in validation, and their models.

        The number is an estimate from the size of the input and that of its early lines.
        """
        names = ("input_bytes", "body_bytes", "used_lines", "used_bytes")
        replies = self.commands(
            command
            for batch in batches
            for command in (
                ["HMGET", keys.batch(batch), *names],
                ["HLEN", keys.bodies(batch)],
                ["SMEMBERS", keys.batch_models(batch)],
            )
        )
        for row, held, models in zip(replies[::3], replies[1::3], replies[2::3], strict=True):
            record = BatchFields.read(names, row)
            size = max(1, record.body_bytes + record.used_bytes)
            lines = record.input_bytes * (held + record.used_lines) // size
            yield max(held, lines - record.used_lines), [text(one) for one in models]

    def _ages(self, lists: list["_WaitingList"]) -> dict[str, dict[str, float]]:
        """Return the age in seconds of the oldest request of these lists, by kind and model.

        Lists are in order of arrival, so only the head is read. A call that was just claimed is not
        counted.
        """
        live = [one for one in lists if one.kind == "live"]
        (seconds, micros), *heads = self.commands([["TIME"], *(["LINDEX", one.key, 0] for one in live)])
        found = [(one, text(head).rpartition("/")[0]) for one, head in zip(live, heads, strict=True) if head]
        since = self.commands(["HGET", keys.bodies(call), "since"] for _, call in found)
        begun = [(one, int(moment) / 1000) for (one, _), moment in zip(found, since, strict=True) if moment]
        begun += [(one, float(one.created)) for one in lists if one.created]
        ages: dict[str, dict[str, float]] = {"live": {}, "batch": {}}
        for one, moment in begun:
            age = max(0.0, int(seconds) + int(micros) / 1e6 - moment)
            ages[one.kind][one.model] = max(ages[one.kind].get(one.model, 0.0), age)
        return ages


class _WaitingList(NamedTuple):
    """A list of requests that wait for a worker."""

    kind: str
    model: str
    key: str
    created: bytes | None = None  # when its batch was created, unix seconds


def _of_model(model: str) -> list[list[Any]]:
    return [["ZCARD", keys.quarantined(model)], ["ZRANGE", keys.live_tenants(model), 0, -1]]


def _of_batch(batch: str) -> list[list[str]]:
    return [["HMGET", keys.batch(batch), "state", "created_at", "risk"], ["SMEMBERS", keys.batch_models(batch)]]
