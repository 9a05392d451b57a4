"""What a Prometheus server scrapes."""

import time

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from jobs.queue import keys
from jobs.queue.gauges import GpuGauges, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.requests import request, start_batch

_ODD = 'a"b\\c\n\\n{d="e"} 1'


def test_every_metric_is_reported_with_its_labels(http: httpx.Client, queue: Queue, redis_client: redis.Redis) -> None:
    for name, state in (("one", "ready"), ("two", "ready"), ("three", "loading")):
        queue.register_worker(WorkerRecord(name, ["m"], state, 128, time.time(), "host", 1))  # type: ignore[arg-type]
    queue.report_gauges(
        "one",
        WorkerGauges(
            7,
            2,
            30,
            40,
            1000,
            12.5,
            [GpuGauges("NVIDIA H200", "GPU-1", 0.25, 10, 20, 400.5), GpuGauges("MIG", "GPU-2")],
        ),
    )
    queue.report_gauges("gone", WorkerGauges(1, 1, 1, 1, 1, 1.0))
    start_batch(queue, "batch_a", 3, model="m")
    redis_client.sadd(keys.ACTIVE, "batch_a")
    queue.submit("live_1", request("m"))
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    of_one = 'worker="one",model="m"'
    assert {
        'pipeline_workers{state="loading"} 1',
        'pipeline_workers{state="ready"} 2',
        'pipeline_requests_waiting{model="m",kind="live"} 1',
        'pipeline_requests_waiting{model="m",kind="batch"} 3',
        'pipeline_requests_waiting{model="m",kind="suspect"} 0',
        'pipeline_batches{state="in_progress"} 1',
        'pipeline_batches_ended_total{state="completed"} 0',
        "pipeline_generated_tokens_total 0",
        f"pipeline_engine_running{{{of_one}}} 7",
        f"pipeline_engine_waiting{{{of_one}}} 2",
        f"pipeline_engine_free_blocks{{{of_one}}} 30",
        f"pipeline_engine_tokens_total{{{of_one}}} 1000",
        f"pipeline_engine_tokens_per_second{{{of_one}}} 12.5",
        f'pipeline_gpu_busy_ratio{{{of_one},card="GPU-1",name="NVIDIA H200"}} 0.25',
        f'pipeline_gpu_memory_used_bytes{{{of_one},card="GPU-1",name="NVIDIA H200"}} 10',
        f'pipeline_gpu_power_watts{{{of_one},card="GPU-1",name="NVIDIA H200"}} 400.5',
        "# TYPE pipeline_engine_tokens_total counter",
    } <= set(lines)
    assert not [line for line in lines if "gone" in line or "GPU-2" in line]


def test_what_a_scraper_reads_is_what_was_meant(http: httpx.Client, queue: Queue) -> None:
    queue.register_worker(WorkerRecord("one", [_ODD], "ready", 128, time.time(), "host", 1))
    queue.report_gauges("one", WorkerGauges(7, 2, 30, 40, 10**15, 1e-5, [GpuGauges(_ODD, "GPU-1", watts=0.1)]))
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    (tokens,) = families["pipeline_engine_tokens"].samples
    assert (tokens.name, tokens.labels, tokens.value) == (
        "pipeline_engine_tokens_total",
        {"worker": "one", "model": _ODD},
        10**15,
    )
    (rate,) = families["pipeline_engine_tokens_per_second"].samples
    assert rate.value == 1e-5
    (power,) = families["pipeline_gpu_power_watts"].samples
    assert (power.labels, power.value) == ({"worker": "one", "model": _ODD, "card": "GPU-1", "name": _ODD}, 0.1)
    assert {sample.labels["model"] for sample in families["pipeline_requests_waiting"].samples} == {_ODD}


def test_an_empty_queue_has_metrics_too(http: httpx.Client, redis_client: redis.Redis) -> None:
    assert "pipeline_delivered_tokens_total 0" in http.get("/metrics").text
