"""What Prometheus reads of two real workers, through a real API: every number follows from the
requests that were made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from api.routes.metrics import QUEUE_METRICS
from api.settings import ApiSettings
from jobs.protocol.requests import RequestKey
from jobs.protocol.results import Usage
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from tests.support import http_calls
from tests.support.api_server import running_api
from tests.support.poison import Poison, poisoned_environment
from tests.support.redis_server import running_server
from tests.support.requests import ready_length
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from tests.workers.test_worker import SETTINGS, endless, follow, question, run_batch, slow, submit_batch, submit_live
from workers.replica.statistics import declared_metrics

SYSTEM = {"role": "system", "content": "You answer in few words and never forget to be polite. " * 4}
REPORTED = 60.0  # seconds


class TwoWorkers(NamedTuple):
    """Two workers of two slots each."""

    queue: Queue
    api: str
    workers: tuple[WorkerProcess, WorkerProcess]


class Scraped:
    """The families of one scrape, by name."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self.families = {family.name: family for family in families}

    def total(self, sample: str, **labels: str) -> float:
        """The sum over all workers."""
        return sum(
            each.value
            for family in self.families.values()
            for each in family.samples
            if each.name == sample and labels.items() <= each.labels.items()
        )

    def workers(self) -> set[str]:
        return {
            each.labels["worker"]
            for family in self.families.values()
            for each in family.samples
            if "worker" in each.labels
        }


class Story(NamedTuple):
    """What was asked of the workers, and what they reported then."""

    usages: list[Usage]
    scraped: Scraped


@pytest.fixture(scope="module")
def fleet() -> Iterator[TwoWorkers]:
    flags = ("--lease-seconds", "30", "--stream-interval", "0.2", "--max-num-seqs", "2")
    poisoned = poisoned_environment(Poison("tortoise", "slow"))
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        queue = Queue(connect(server.url), SETTINGS)
        with (
            running_api(ApiSettings(redis_url=server.url, file_store=f"{folder}/store")) as api,
            running_worker(queue, server.url, *flags, ready=False, **poisoned) as one,
            running_worker(queue, server.url, *flags, **poisoned) as other,
        ):
            one.wait_ready()
            yield TwoWorkers(queue, api, (one, other))


@pytest.fixture(scope="module")
def story(fleet: TwoWorkers) -> Story:
    queue, usages = fleet.queue, []
    bodies = [endless(5, seed=line) for line in range(12)]
    shared = [{**body, "messages": [SYSTEM, *body["messages"]]} for body in bodies]
    asked = [question("What is 2 + 3?", seed=line) for line in range(3)]
    usages += [result.usage for result in run_batch(queue, [*shared, *asked])]
    refused = run_batch(queue, [question("x", temperature=-1), question("word " * 3000)])
    assert [result.status for result in refused] == [400, 400]
    batch = submit_batch(queue, [slow(60, seed=line) for line in range(8)])
    wait_until(lambda: ready_length(queue, batch) < 5, 60, "both workers to be full")
    wait_until(
        lambda: sum(bool(queue.read_tokens({RequestKey(batch, line): FIRST_ID})) for line in range(8)) >= 4,
        60,
        "tokens of what runs",
    )
    for body in (endless(7), endless(7, n=2)):
        _, api = submit_live(queue, body)
        usages.append(follow(queue, api)[-1].result.usage)  # type: ignore[union-attr]
    wait_until(lambda: len(queue.results(batch)) == 8, 120, "the batch")
    usages += [result.usage for _, result in queue.results(batch)]
    return Story(usages, scrape_until(fleet, ended(3 + 12 + 8 + 3, errors=2)))


def scrape(fleet: TwoWorkers, accept: str = "text/plain") -> httpx.Response:
    answer = http_calls.get(f"{fleet.api}/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    return answer


def scrape_until(fleet: TwoWorkers, done: Callable[[Scraped], bool]) -> Scraped:
    def look() -> Scraped | None:
        scraped = Scraped(parse_text(scrape(fleet).text))
        return scraped if done(scraped) else None

    found = wait_until(look, REPORTED, "the workers to report it")
    assert found is not None
    return found


def ended(requests: int, errors: int) -> Callable[[Scraped], bool]:
    return lambda scraped: (
        scraped.total("vllm:request_success_total") == requests
        and scraped.total("pipeline_request_errors_total") == errors
    )


@pytest.mark.proof
def test_every_declared_metric_is_reported_by_both_workers(fleet: TwoWorkers, story: Story) -> None:
    ids = {worker.wait_ready().id for worker in fleet.workers}
    for declared in declared_metrics():
        family = story.scraped.families[declared.name]
        assert (family.type, family.documentation) == (declared.kind, declared.help)
        assert {sample.labels["model_name"] for sample in family.samples} == {"demo"}
        reporting = {sample.labels["worker"] for sample in family.samples}
        assert reporting == ids if declared.name != "pipeline_request_errors" else reporting <= ids
    own = {metric.name for metric in QUEUE_METRICS if "gpu" not in metric.name}
    assert own - set(story.scraped.families) == {"pipeline_batches"}  # no control plane, so no active batch


def test_requests_and_tokens_are_those_of_the_results(story: Story) -> None:
    total, usages = story.scraped.total, story.usages
    assert total("vllm:request_success_total", finished_reason="stop") == 3
    assert total("vllm:request_success_total", finished_reason="length") == 12 + 8 + 3
    assert total("vllm:request_success_total", finished_reason="abort") == 0
    assert total("vllm:request_success_total", finished_reason="error") == 0
    outputs = sum(usage.completion_tokens for usage in usages)
    twice = usages[16].prompt_tokens  # of the call with two choices
    assert total("vllm:generation_tokens_total") == total("vllm:request_generation_tokens_sum") == outputs
    prompts = sum(usage.prompt_tokens for usage in usages) + twice
    assert total("vllm:prompt_tokens_total") == total("vllm:request_prompt_tokens_sum") == prompts


def test_errors_are_counted_by_code(story: Story) -> None:
    total = story.scraped.total
    assert total("pipeline_request_errors_total", code="context_length_exceeded") == 1
    assert total("pipeline_request_errors_total", code="decimal_below_min_value") == 1


def test_cached_tokens_and_prefix_hits_come_from_the_shared_beginning(story: Story) -> None:
    total = story.scraped.total
    assert total("vllm:prompt_tokens_cached_total") >= sum(usage.cached_tokens for usage in story.usages) > 100
    assert total("vllm:prefix_cache_hits_total") == total("vllm:prompt_tokens_cached_total")
    # Beside those of the requests, of what each worker ran of its own
    assert 0 <= total("vllm:prefix_cache_queries_total") - total("vllm:prompt_tokens_total") <= 2 * 16


def test_a_live_call_that_finds_every_slot_taken_counts_as_a_preemption(story: Story) -> None:
    assert story.scraped.total("vllm:num_preemptions_total") >= 1


def test_times_are_observed_once_per_request_or_token(story: Story) -> None:
    total, requests = story.scraped.total, {"live": 3, "batch": 12 + 3 + 8}
    names = ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds")
    for kind, count in requests.items():
        assert [total(f"vllm:{name}_count", kind=kind) for name in names] == [count] * 3
        queued, first, whole = (total(f"vllm:{name}_sum", kind=kind) for name in names)
        assert 0 < queued < first < whole
    gaps = total("vllm:inter_token_latency_seconds_count")
    assert gaps == total("vllm:generation_tokens_total") - sum(requests.values())
    # A token of a slow line takes 50 ms
    assert total("vllm:inter_token_latency_seconds_sum") > 8 * 59 * 0.05
    steps = total("pipeline_step_seconds_count")
    assert steps == total("pipeline_step_rows_count") == total("vllm:iteration_tokens_total_count") > 60
    assert total("pipeline_step_rows_sum") >= total("vllm:generation_tokens_total")
    assert total("vllm:iteration_tokens_total_sum") > total("pipeline_step_rows_sum")
    assert total("pipeline_step_seconds_sum") > 60 * 0.05


def test_gauges_say_that_the_workers_are_idle(story: Story) -> None:
    total = story.scraped.total
    assert total("vllm:num_requests_running") == total("vllm:num_requests_waiting") == 0
    assert total("vllm:kv_cache_usage_perc") == 0
    assert total("pipeline_engine_blocks") == total("pipeline_engine_free_blocks") + 2  # the null blocks


def test_buckets_are_cumulative_and_end_with_the_count(story: Story) -> None:
    buckets: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for declared in declared_metrics():
        for sample in story.scraped.families[declared.name].samples if declared.kind == "histogram" else []:
            if sample.name.endswith("_bucket"):
                series = (declared.name, sample.labels["worker"], sample.labels.get("kind", ""))
                buckets.setdefault(series, []).append((float(sample.labels["le"]), sample.value))
    assert len(buckets) == 2 * (6 + 3 * 2)
    for (name, worker, kind), series in buckets.items():
        assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(series))
        labels = {"worker": worker, **({"kind": kind} if kind else {})}
        assert series[-1] == (float("inf"), story.scraped.total(f"{name}_count", **labels))


def test_openmetrics_has_the_same_numbers(fleet: TwoWorkers, story: Story) -> None:
    answer = scrape(fleet, "application/openmetrics-text;version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    scraped = Scraped(parse_openmetrics(answer.text))
    assert {name for name in scraped.families if name.startswith("vllm:")} == {
        name for name in story.scraped.families if name.startswith("vllm:")
    }
    for sample in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum"):
        assert scraped.total(sample) == story.scraped.total(sample) > 0


def test_a_cancelled_call_counts_as_aborted(fleet: TwoWorkers, story: Story) -> None:
    key, api = submit_live(fleet.queue, slow(600))
    follow(fleet.queue, api, until=3)
    fleet.queue.cancel([key])
    before = story.scraped.total("vllm:request_success_total")
    scraped = scrape_until(fleet, ended(int(before) + 1, errors=2))
    assert scraped.total("vllm:request_success_total", finished_reason="abort") == 1


@pytest.mark.proof
def test_a_worker_that_ended_is_reported_no_more(fleet: TwoWorkers, story: Story) -> None:
    one, other = fleet.workers
    gone, left = one.wait_ready().id, other.wait_ready().id
    assert one.stop() == 0
    scraped = scrape_until(fleet, lambda scraped: scraped.workers() == {left})
    assert gone not in scraped.workers()
    assert scraped.total("vllm:generation_tokens_total") > 0
