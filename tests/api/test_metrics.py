"""What a Prometheus server scrapes; `tests/workers/test_worker_metrics.py` has real workers."""

import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest
import redis
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jobs.queue import keys
from jobs.queue.gauges import GpuGauges, MetricDescriptor, MetricSample, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.requests import request, start_batch

_ODD = 'a"b\\c\n\\n{d="e"} 1'
ENDED = MetricDescriptor("vllm:request_success", "Requests that ended.", "counter", "finished_reason")
USAGE = MetricDescriptor("vllm:kv_cache_usage_perc", "Share in use.", "gauge")
LATENCY = MetricDescriptor("vllm:e2e_request_latency_seconds", "Latency.", "histogram", "kind", [0.3, 1.0])
STEPS = MetricDescriptor("vllm:iteration_tokens_total", "Tokens of a step.", "histogram", buckets=[1.0])
# What a client asks for, and what reads the answer; the last two are Prometheus 2 and 3
READERS = [
    ("", parse_text),
    ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", parse_openmetrics),
    ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8", parse_openmetrics),
]


def register(queue: Queue, worker: str, *metrics: MetricDescriptor, state: str = "ready", model: str = "m") -> None:
    queue.register_worker(
        WorkerRecord(worker, [model], state, 128, time.time(), "host", 1, list(metrics))  # type: ignore[arg-type]
    )


def report(queue: Queue, worker: str, *samples: list[MetricSample], gpus: list[GpuGauges] | None = None) -> None:
    queue.report_gauges(worker, WorkerGauges(7, 2, 12.5, gpus or [], list(samples)))


def samples_of(http: httpx.Client, name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels, in the order of their names."""
    families = {family.name: family for family in parse_text(http.get("/metrics").text)}
    return {
        (sample.name.removeprefix(name), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for sample in families[name].samples
    }


def test_every_metric_of_the_queue_is_reported(http: httpx.Client, queue: Queue, redis_client: redis.Redis) -> None:
    for name, state in (("one", "ready"), ("two", "ready"), ("three", "loading")):
        register(queue, name, state=state)
    gpus = [GpuGauges("NVIDIA H200", "GPU-1", 0.25, 10, 20, 400.5), GpuGauges("MIG", "GPU-2")]
    report(queue, "one", gpus=gpus)
    report(queue, "gone", gpus=gpus)
    start_batch(queue, "batch_a", 3, model="m")
    redis_client.sadd(keys.ACTIVE, "batch_a")
    queue.submit("live_1", request("m"))
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    of_gpu = 'card="GPU-1",model_name="m",name="NVIDIA H200",worker="one"'
    assert {
        'pipeline_workers{state="loading"} 1.0',
        'pipeline_workers{state="ready"} 2.0',
        'pipeline_requests_waiting{kind="live",model_name="m"} 1.0',
        'pipeline_requests_waiting{kind="batch",model_name="m"} 3.0',
        'pipeline_requests_waiting{kind="suspect",model_name="m"} 0.0',
        'pipeline_oldest_request_age_seconds{kind="batch",model_name="m"} 0.0',  # of a batch without a date
        "pipeline_requests_ended_total 0.0",
        'pipeline_batches{state="in_progress"} 1.0',
        'pipeline_batches_at_risk{risk="urgent"} 0.0',
        'pipeline_batches_at_risk{risk="late"} 0.0',
        'pipeline_batches_ended_total{state="completed"} 0.0',
        "pipeline_generated_tokens_total 0.0",
        "pipeline_delivered_tokens_total 0.0",
        f"pipeline_gpu_busy_ratio{{{of_gpu}}} 0.25",
        f"pipeline_gpu_memory_used_bytes{{{of_gpu}}} 10.0",
        f"pipeline_gpu_memory_bytes{{{of_gpu}}} 20.0",
        f"pipeline_gpu_power_watts{{{of_gpu}}} 400.5",
        "# TYPE pipeline_batches_ended_total counter",
    } <= set(lines)
    assert not [line for line in lines if "gone" in line or "GPU-2" in line]


@pytest.mark.parametrize(("accept", "parse"), READERS)
def test_what_a_scraper_reads_is_what_was_meant(
    http: httpx.Client, queue: Queue, accept: str, parse: Callable[[str], Iterator[Metric]]
) -> None:
    register(queue, "one", LATENCY, ENDED, STEPS, model=_ODD)
    report(
        queue,
        "one",
        [MetricSample("live", 2.5, [2, 0, 1])],
        [MetricSample("stop", 10**15)],
        [MetricSample("", 9.0, [0, 3])],
        gpus=[GpuGauges(_ODD, "GPU-1", watts=0.1)],
    )
    text = http.get("/metrics", headers={"accept": accept}).text
    families = {family.name: family for family in parse(text)}
    assert all(family.documentation for family in families.values())
    own = {"worker": "one", "model_name": _ODD}
    (ended,) = families["vllm:request_success"].samples
    assert (ended.name, ended.labels, ended.value) == (
        "vllm:request_success_total",
        {**own, "finished_reason": "stop"},
        10**15,
    )
    latency, steps = families["vllm:e2e_request_latency_seconds"], families["vllm:iteration_tokens_total"]
    assert (latency.type, steps.type) == ("histogram", "histogram")
    found = [(sample.name.rpartition("_")[2], sample.labels.get("le"), sample.value) for sample in latency.samples]
    assert found == [
        ("bucket", "0.3", 2),
        ("bucket", "1.0", 2),
        ("bucket", "+Inf", 3),
        ("count", None, 3),
        ("sum", None, 2.5),
    ]
    assert {"kind": "live", **own} == latency.samples[-1].labels
    assert [sample.value for sample in steps.samples] == [0, 3, 3, 9]
    (power,) = families["pipeline_gpu_power_watts"].samples
    assert (power.labels, power.value) == ({**own, "card": "GPU-1", "name": _ODD}, 0.1)


def test_two_workers_have_their_samples_side_by_side(http: httpx.Client, queue: Queue) -> None:
    register(queue, "one", USAGE, ENDED)
    register(queue, "two", ENDED, USAGE)
    report(queue, "one", [MetricSample("", 0.5)], [MetricSample("stop", 1), MetricSample("length", 2)])
    report(queue, "two", [MetricSample("stop", 3)], [MetricSample("", 0.25)])
    assert samples_of(http, "vllm:request_success") == {
        ("_total", "stop", "m", "one"): 1,
        ("_total", "length", "m", "one"): 2,
        ("_total", "stop", "m", "two"): 3,
    }
    assert samples_of(http, "vllm:kv_cache_usage_perc") == {("", "m", "one"): 0.5, ("", "m", "two"): 0.25}


def test_a_worker_that_means_another_thing_by_a_name_is_left_out(http: httpx.Client, queue: Queue) -> None:
    other = [msgspec.structs.replace(USAGE, kind="counter"), msgspec.structs.replace(USAGE, label="kind")]
    for number, declared in enumerate((USAGE, *other)):
        register(queue, f"w{number}", declared)
        report(queue, f"w{number}", [MetricSample("", 0.5)])
    assert samples_of(http, "vllm:kv_cache_usage_perc") == {("", "m", "w0"): 0.5}


def test_an_empty_queue_has_metrics_too(http: httpx.Client, redis_client: redis.Redis) -> None:
    assert "pipeline_delivered_tokens_total 0.0" in http.get("/metrics").text
