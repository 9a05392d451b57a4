"""What a worker counts, and what it declares of it."""

from typing import Any

import pytest

from workers.engine.client.engine_metrics import EngineMetrics
from workers.engine.messages.core import Stats
from workers.engine.messages.metrics import Counter, Histogram
from workers.replica.statistics import declared_metrics


def test_a_bucket_has_what_is_not_above_its_bound() -> None:
    histogram = Histogram("h", "…", (1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.samples() == [("", 6.6, [2, 2, 1])]
    histogram.observe(0.5, count=10)
    assert histogram.samples() == [("", 11.6, [12, 2, 1])]


def test_values_of_a_label_that_are_known_are_there_from_the_start() -> None:
    counter = Counter("c", "…", "reason", ("stop", "length"))
    counter.add(2, "length")
    counter.add(label="other")
    assert counter.samples() == [("stop", 0), ("length", 2), ("other", 1)]
    assert Counter("c", "…", "code").samples() == []
    assert Histogram("h", "…", (1.0,), "kind", ("live",)).samples() == [("live", 0, [0, 0])]


def test_of_stats_the_last_numbers_count_and_every_observation() -> None:
    metrics, other = EngineMetrics(), EngineMetrics()
    metrics.record(Stats(running=3, preemptions=1, step_rows=[(3, "")], queue_seconds=[(0.1, "live"), (9.0, "live")]))
    metrics.record(Stats(running=2, preemptions=4, step_rows=[(2, "")]))
    assert total(metrics, "vllm:num_requests_running") == [("", 2)]
    assert total(metrics, "vllm:num_preemptions") == [("", 4)]
    assert [(label, value, sum(counts)) for label, value, counts in total(metrics, "pipeline_step_rows")] == [
        ("", 5, 2)
    ]
    assert [(value, sum(counts)) for _, value, counts in total(metrics, "vllm:request_queue_time_seconds")] == [
        (9.1, 2),
        (0, 0),
    ]
    assert [sum(counts) for _, _, counts in total(other, "pipeline_step_rows")] == [0]


def total(metrics: EngineMetrics, name: str) -> list[Any]:
    (found,) = (one for one in metrics.all() if one.name == name)
    return found.samples()


@pytest.mark.parametrize("declared", declared_metrics(), ids=lambda declared: declared.name)
def test_a_declaration_is_one_that_prometheus_takes(declared: Any) -> None:
    assert [other.name for other in declared_metrics()].count(declared.name) == 1
    assert declared.name.startswith(("vllm:", "pipeline_"))
    assert declared.help.endswith(".")
    assert (declared.kind == "histogram") == bool(declared.buckets)
    assert declared.buckets == sorted(set(declared.buckets))
    assert declared.kind != "counter" or not declared.name.endswith("_total")
