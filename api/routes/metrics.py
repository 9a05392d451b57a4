"""`/metrics`: the queue, the workers and their cards in Prometheus' text format, read from Redis at
each scrape.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from api.state import state_of
from jobs.queue.gauges import GpuGauges, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Metric:
    """One metric and its samples: labels, and the value."""

    name: str
    kind: str  # "gauge" or "counter"
    says: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """Nothing where nothing is known."""
        if value is not None:
            self.samples.append((labels, value))

    def lines(self) -> Iterator[str]:
        """As the text format has it."""
        yield f"# HELP {self.name} {self.says}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            yield f"{self.name}{{{inner}}} {value!r}" if inner else f"{self.name} {value!r}"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """503 while the queue does not answer, so that a scrape counts as failed."""
    try:
        found = await asyncio.to_thread(collect, state_of(request).queue)
    except QueueUnavailable:
        return PlainTextResponse("the queue does not answer\n", 503)
    lines = [line for metric in found if metric.samples for line in metric.lines()]
    return PlainTextResponse("\n".join(lines) + "\n", media_type=CONTENT_TYPE)


def collect(queue: Queue) -> list[Metric]:
    """Everything there is to tell."""
    return [*_of_queue(queue), *_of_workers(queue)]


def _of_queue(queue: Queue) -> Iterator[Metric]:
    models = [record.name for record in queue.models()]
    depths, totals = queue.depths(models), queue.token_totals()
    waiting = Metric(
        "pipeline_requests_waiting",
        "gauge",
        "Requests that wait for a worker: live, batch (in the ready lists), suspect.",
    )
    for kind, by_model in (("live", depths.live), ("batch", depths.batch), ("suspect", depths.quarantined)):
        for model, count in sorted(by_model.items()):
            waiting.add(count, model=model, kind=kind)
    yield waiting
    batches = Metric("pipeline_batches", "gauge", "Batches that the control plane has work on, by state.")
    for state, count in sorted(depths.batches.items()):
        batches.add(count, state=state)
    yield batches
    ended = Metric("pipeline_batches_ended_total", "counter", "Batches that ended, by how.")
    for state, count in sorted(depths.ended.items()):
        ended.add(count, state=state)
    yield ended
    generated = Metric("pipeline_generated_tokens_total", "counter", "Output tokens that workers generated.")
    generated.add(totals.generated)
    yield generated
    delivered = Metric("pipeline_delivered_tokens_total", "counter", "Output tokens of finished requests.")
    delivered.add(totals.delivered)
    yield delivered


def _of_workers(queue: Queue) -> Iterator[Metric]:
    workers = queue.workers()
    states = Metric("pipeline_workers", "gauge", "Workers by state.")
    for state, count in sorted(Counter(worker.state for worker in workers).items()):
        states.add(count, state=state)
    yield states
    gauges = queue.gauges([worker.id for worker in workers])
    told = [(_labels(worker), gauges[worker.id]) for worker in workers if worker.id in gauges]
    for name, kind, says, of_engine in _ENGINE:
        metric = Metric(name, kind, says)
        for labels, engine in told:
            metric.add(of_engine(engine), **labels)
        yield metric
    for name, kind, says, of_gpu in _GPU:
        metric = Metric(name, kind, says)
        for labels, engine in told:
            for gpu in engine.gpus:
                metric.add(of_gpu(gpu), **labels, card=gpu.uuid, name=gpu.name)
        yield metric


def _labels(worker: WorkerRecord) -> dict[str, str]:
    return {"worker": worker.id, "model": worker.models[0] if worker.models else ""}


_ENGINE: list[tuple[str, str, str, Callable[[WorkerGauges], float]]] = [
    ("pipeline_engine_running", "gauge", "Sequences that the engine computes.", lambda engine: engine.running),
    (
        "pipeline_engine_waiting",
        "gauge",
        "Sequences that the engine holds and has no room for.",
        lambda engine: engine.waiting,
    ),
    (
        "pipeline_engine_free_blocks",
        "gauge",
        "Blocks of the KV cache that are free.",
        lambda engine: engine.free_blocks,
    ),
    ("pipeline_engine_blocks", "gauge", "Blocks of the KV cache.", lambda engine: engine.num_blocks),
    (
        "pipeline_engine_tokens_total",
        "counter",
        "Output tokens that the engine generated in its life.",
        lambda engine: engine.tokens,
    ),
    (
        "pipeline_engine_tokens_per_second",
        "gauge",
        "Output tokens per second of late.",
        lambda engine: engine.tokens_per_second,
    ),
]
_GPU: list[tuple[str, str, str, Callable[[GpuGauges], float | None]]] = [
    (
        "pipeline_gpu_busy_ratio",
        "gauge",
        "Share of the last moments in which something ran on the GPU.",
        lambda gpu: gpu.busy,
    ),
    (
        "pipeline_gpu_memory_used_bytes",
        "gauge",
        "Memory of the GPU in use, by whomever.",
        lambda gpu: gpu.memory_used,
    ),
    ("pipeline_gpu_memory_bytes", "gauge", "Memory of the GPU.", lambda gpu: gpu.memory_total),
    ("pipeline_gpu_power_watts", "gauge", "What the GPU draws.", lambda gpu: gpu.watts),
]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
