"""`/metrics`: the queue, the workers and their GPUs for Prometheus, read from Redis at each scrape.

Workers declare what their engines report (`workers/engine/messages/metrics.py`), under the names
that are shown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from api.state import state_of
from api.threads import LIVE, run_in
from jobs.queue.gauges import MetricDescriptor, MetricSample, WorkerGauges
from jobs.queue.reading import QueueReading, read_fleet
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable

router = APIRouter()

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

OF_WORKER = ("worker", "model_name")
"""Labels of every metric of a worker."""

_OF_GPU = (*OF_WORKER, "card", "name")
_OWN: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}
_DECLARED: dict[str, type[Family]] = {**_OWN, "histogram": HistogramMetricFamily}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Answer a scrape; with 503 while the queue does not answer, so that it counts as failed."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    collector = QueueCollector(state_of(request).fleet.probe_queue)
    try:
        # Otherwise prometheus-client 0.26 replaces the colon of a name in OpenMetrics samples
        text = await run_in(LIVE, encode, collector, escaping=ALLOWUTF8)  # type: ignore[call-arg]
        return Response(text, media_type=content_type)
    except QueueUnavailable:
        return PlainTextResponse("the queue does not answer\n", 503, {"retry-after": "1"})


class QueueMetric(NamedTuple):
    """A metric of the queue, and the function that reads its samples (label values, number).

    All are read from Redis, so that each API process answers the same.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[QueueReading], Iterable[tuple[Sequence[str], float]]]


class QueueCollector(Collector):
    """Read the metrics from Redis at each scrape."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Family]:
        reading = read_fleet(self._queue)
        for metric in QUEUE_METRICS:
            family = _OWN[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples(reading):
                family.add_metric(labels, value)
            if family.samples:
                yield family
        yield from _of_engines(reading.reported)


def _of_engines(reported: Iterable[tuple[WorkerRecord, WorkerGauges]]) -> Iterable[Family]:
    """Return the metrics that workers declare.

    A metric that is declared differently by a worker, perhaps of another version, is left out for
    it.
    """
    found: dict[str, tuple[MetricDescriptor, Family]] = {}
    for worker, gauges in reported:
        for declared, samples in zip(worker.metrics, gauges.metrics, strict=False):
            if declared.kind not in _DECLARED:
                continue
            if declared.name not in found:
                labels = (*OF_WORKER, declared.label) if declared.label else OF_WORKER
                found[declared.name] = declared, _DECLARED[declared.kind](declared.name, declared.help, labels=labels)
            first, family = found[declared.name]
            if (first.kind, first.label) == (declared.kind, declared.label):
                _add(family, _labels(worker), declared, samples)
    return [family for _, family in found.values()]


def _add(family: Family, of_worker: Sequence[str], declared: MetricDescriptor, samples: list[MetricSample]) -> None:
    bounds = [*map(floatToGoString, declared.buckets), "+Inf"]
    for sample in samples:
        labels = (*of_worker, sample.label)  # an empty label has no name
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(labels, list(zip(bounds, accumulate(sample.counts), strict=True)), sample.value)
        else:
            family.add_metric(labels, sample.value)


def _labels(worker: WorkerRecord) -> tuple[str, str]:
    return worker.id, worker.models[0] if worker.models else ""


def _by_model(reading: QueueReading) -> Iterator[tuple[Sequence[str], float]]:
    depths = reading.depths
    for kind, by_model in (("live", depths.live), ("batch", depths.batch), ("suspect", depths.quarantined)):
        for model, count in sorted(by_model.items()):
            yield (model, kind), count


def _oldest(reading: QueueReading) -> Iterator[tuple[Sequence[str], float]]:
    depths = reading.depths
    for kind, ages, models in (("live", depths.oldest_live, depths.live), ("batch", depths.oldest_batch, depths.batch)):
        for model in sorted(models):
            yield (model, kind), ages.get(model, 0.0)


def _by_state(counts: Mapping[str, int]) -> list[tuple[Sequence[str], float]]:
    return [((state,), count) for state, count in sorted(counts.items())]


def _of_gpus(figure: str) -> Callable[[QueueReading], Iterator[tuple[Sequence[str], float]]]:
    """Return a reader of one field of `GpuGauges`; a GPU that does not report it has no sample."""

    def samples(reading: QueueReading) -> Iterator[tuple[Sequence[str], float]]:
        for worker, gauges in reading.reported:
            for gpu in gauges.gpus:
                if (value := getattr(gpu, figure)) is not None:
                    yield (*_labels(worker), gpu.uuid, gpu.name), value

    return samples


QUEUE_METRICS = (
    QueueMetric(
        "pipeline_requests_waiting",
        "gauge",
        "Requests waiting for a worker: live calls, batch lines in the ready lists, those in quarantine (suspect).",
        ("model_name", "kind"),
        _by_model,
    ),
    QueueMetric(
        "pipeline_oldest_request_age_seconds",
        "gauge",
        "Age of the oldest request that waits for a worker: of a live call since it was submitted, of a batch line"
        " since its batch was created; 0 where none waits.",
        ("model_name", "kind"),
        _oldest,
    ),
    QueueMetric(
        "pipeline_requests_ended",
        "counter",
        "Live calls and batch lines that ended with a result, also those that failed.",
        (),
        lambda reading: [((), reading.requests_ended)],
    ),
    QueueMetric(
        "pipeline_batches",
        "gauge",
        "Batches with work left for the control plane, by state.",
        ("state",),
        lambda reading: _by_state(reading.depths.batches),
    ),
    QueueMetric(
        "pipeline_batches_at_risk",
        "gauge",
        "Batches in progress that may miss the end of their windows; late ones need more than their tenant's rate.",
        ("risk",),
        lambda reading: _by_state(reading.depths.at_risk),
    ),
    QueueMetric(
        "pipeline_batches_ended",
        "counter",
        "Batches that ended, by final state.",
        ("state",),
        lambda reading: _by_state(reading.depths.ended),
    ),
    QueueMetric(
        "pipeline_webhook_deliveries",
        "counter",
        "Attempts to deliver a webhook, by result: delivered, failed (it is retried), abandoned.",
        ("result",),
        lambda reading: [((result,), count) for result, count in reading.webhook_attempts.items()],
    ),
    QueueMetric(
        "pipeline_generated_tokens",
        "counter",
        "Output tokens generated by all workers, those of copies included.",
        (),
        lambda reading: [((), reading.totals.generated)],
    ),
    QueueMetric(
        "pipeline_delivered_tokens",
        "counter",
        "Output tokens of finished requests.",
        (),
        lambda reading: [((), reading.totals.delivered)],
    ),
    QueueMetric(
        "pipeline_workers",
        "gauge",
        "Workers by state.",
        ("state",),
        lambda reading: _by_state(Counter(worker.state for worker in reading.workers)),
    ),
    QueueMetric(
        "pipeline_gpu_busy_ratio",
        "gauge",
        "Share of the driver's last sample period in which a kernel ran on the GPU.",
        _OF_GPU,
        _of_gpus("busy"),
    ),
    QueueMetric(
        "pipeline_gpu_memory_used_bytes",
        "gauge",
        "GPU memory used by all processes in bytes.",
        _OF_GPU,
        _of_gpus("memory_used"),
    ),
    QueueMetric("pipeline_gpu_memory_bytes", "gauge", "GPU memory in bytes.", _OF_GPU, _of_gpus("memory_total")),
    QueueMetric("pipeline_gpu_power_watts", "gauge", "Power drawn by the GPU in watts.", _OF_GPU, _of_gpus("watts")),
)
