"""Which batches may miss the end of their windows: judged by what is left of them and by the rates
of their tenants, over minutes that tests pass by themselves.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.control.deadlines import JUDGE_SECONDS, Deadlines
from jobs.control.ticker import Ticker
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import begin, step, tick
from tests.support.control_plane import write_input
from tests.support.redis_machine import RedisMachine
from tests.support.requests import MODEL, start_batch

NOW, COST = 1e9, 256


class JudgedBatches:
    """Batches of lines of `COST` tokens, and a ticker's judgements of them."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.deadlines, self.now = queue, Deadlines(queue), NOW

    def add(self, batch: str, lines: int, window: float | None, tenant: str = "", model: str = MODEL) -> None:
        expires = {} if window is None else {"expires": self.now + window}
        fields = {"timestamps": expires, "line_models": [model]}
        assert self.queue.create_batch(batch, lines, tenant=tenant, state="in_progress", fields=fields)
        self.queue.announce(tenant, batch, listed=False, runs=True)

    def run(self, seconds: float, rates: Mapping[str, float]) -> dict[str, str]:
        """Let so much time pass, with so many lines a second; return the risks then."""
        for _ in range(int(seconds / JUDGE_SECONDS)):
            self.now += JUDGE_SECONDS
            for batch, rate in rates.items():
                for name, count in (("completed", 1), ("used_lines", 1), ("used_tokens", COST)):
                    self.queue.redis.hincrby(keys.batch(batch), name, int(rate * JUDGE_SECONDS * count))
            self.deadlines.judge(self.queue.active_batches(), self.now)
        return {batch: fields.risk for batch, fields in self.queue.active_batches().items()}


@pytest.fixture
def batches(queue: Queue) -> JudgedBatches:
    return JudgedBatches(queue)


def test_a_batch_that_is_on_time_is_at_no_risk(batches: JudgedBatches) -> None:
    batches.add("a", 10_000, 3600)
    batches.add("b", 100_000, None)
    assert batches.run(600, {"a": 5, "b": 5}) == {"a": "", "b": ""}


def test_a_batch_becomes_urgent_in_time_and_returns(batches: JudgedBatches) -> None:
    """It needs 1,000 s of all of the tenant's rate, and gets a tenth of it."""
    batches.add("a", 10_000, 4000)
    batches.add("b", 1_000_000, None)
    assert batches.run(1000, {"a": 1, "b": 9})["a"] == "", "there is time enough"
    found = batches.run(1600, {"a": 1, "b": 9})
    assert found == {"a": "urgent", "b": ""}, "it needs more than half of what is left"
    assert batches.run(300, {"a": 10, "b": 0})["a"] == "urgent", "it does not return at once"
    assert batches.run(400, {"a": 10, "b": 0})["a"] == "", "it needs less than a quarter"


def test_a_batch_that_cannot_be_saved_keeps_its_place_and_lets_others_be_saved(batches: JudgedBatches) -> None:
    batches.add("lost", 100_000, 1000)
    batches.add("saved", 10_000, 1500)
    batches.add("b", 1_000_000, None)
    assert batches.run(60, {"lost": 1, "saved": 1, "b": 8}) == {"lost": "late", "saved": "urgent", "b": ""}


def test_work_that_must_be_done_before_counts(batches: JudgedBatches) -> None:
    """Each could be done in time alone. Of two that cannot both be, the earlier is saved."""
    for number, window in enumerate((1000, 1400, 1800)):
        batches.add(f"batch_{number}", 7_500, window)
    batches.add("b", 1_000_000, None)
    rates = {"batch_0": 1.0, "batch_1": 0.0, "batch_2": 1.0, "b": 8}
    assert batches.run(20, rates) == {"batch_0": "urgent", "batch_1": "late", "batch_2": "urgent", "b": ""}


def test_the_rates_of_other_tenants_and_models_save_no_batch(batches: JudgedBatches) -> None:
    batches.add("a", 10_000, 2000, tenant="a")
    batches.add("other_tenant", 1_000_000, None, tenant="b")
    batches.add("other_model", 1_000_000, None, tenant="a", model="other")
    rates = {"a": 1.0, "other_tenant": 100, "other_model": 100}
    assert batches.run(30, rates)["a"] == "late"
    batches.add("same", 1_000_000, None, tenant="a")
    assert batches.run(60, {**rates, "same": 100})["a"] == "", "there is time enough again"


def test_without_a_rate_nothing_is_judged(batches: JudgedBatches) -> None:
    batches.add("a", 10_000, 300)
    batches.add("new", 10_000, 300, tenant="new")
    batches.run(120, {})
    assert batches.run(2 * JUDGE_SECONDS, {"a": 1}) == {"a": "", "new": ""}
    assert batches.run(JUDGE_SECONDS, {"a": 1}) == {"a": "late", "new": ""}


@pytest.mark.parametrize("seconds", [20, 600])
def test_an_outage_is_no_rate(batches: JudgedBatches, seconds: float) -> None:
    """Also in the minute after it."""
    batches.add("a", 50_000, 20_000)
    batches.add("b", 1_000_000, None)
    rates = {"a": 4, "b": 4}
    assert batches.run(600, rates)["a"] == ""
    for _ in range(seconds // 5):
        assert batches.run(5, {})["a"] == ""
    for _ in range(24):
        assert batches.run(5, rates)["a"] == ""


def test_lines_that_finish_seldom_have_a_rate(batches: JudgedBatches) -> None:
    """One of a batch in half a minute."""
    batches.add("a", 100, 4000)
    for _ in range(6):
        batches.run(25, {})
        found = batches.run(5, {"a": 0.2})
    assert found == {"a": ""}
    batches.add("b", 100, 2000)
    batches.run(25, {})
    assert batches.run(5, {"a": 0.2}) == {"a": "", "b": "late"}


def test_a_new_batch_without_a_finished_line_is_judged_by_the_size_of_its_lines(batches: JudgedBatches) -> None:
    batches.add("b", 1_000_000, None)
    batches.run(20, {"b": 10})
    batches.add("a", 2500, 400)  # of 256 tokens each: 250 s of all
    assert batches.run(10, {"b": 10}) == {"a": "urgent", "b": ""}


def test_it_goes_on_after_a_new_ticker_and_an_empty_redis(batches: JudgedBatches) -> None:
    batches.add("a", 10_000, 2100)
    batches.add("b", 1_000_000, None)
    rates = {"a": 1.0, "b": 9.0}
    assert batches.run(200, rates)["a"] == "urgent"
    batches.deadlines = Deadlines(batches.queue)
    assert batches.run(5, rates)["a"] == "urgent", "the risk is in Redis"
    assert batches.run(60, rates)["a"] == "urgent"
    batches.queue.redis.flushall()
    batches.add("a", 8_000, 1500)
    batches.add("b", 1_000_000, None)
    assert batches.run(5, rates)["a"] == ""
    assert batches.run(60, rates)["a"] == "urgent"


def test_a_clock_that_is_set_back_stops_nothing(batches: JudgedBatches) -> None:
    batches.add("a", 10_000, 2100)
    batches.add("b", 1_000_000, None)
    batches.run(60, {"a": 1, "b": 9})
    batches.now -= 3600
    batches.queue.redis.hincrbyfloat(keys.batch("a"), "expires_at", -3600)
    assert batches.run(300, {"a": 1, "b": 9})["a"] == "urgent"


def test_only_changes_are_written_and_batches_that_do_not_run_are_left_out(
    batches: JudgedBatches, queue: Queue
) -> None:
    batches.add("a", 10_000, 2100)
    batches.add("b", 1_000_000, None)
    assert queue.transition("b", ["in_progress"], "finalizing")
    assert batches.run(60, {"a": 1, "b": 9}) == {"a": "late", "b": ""}
    calls = queue.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    batches.run(60, {"a": 1})
    assert queue.redis.info("commandstats")["cmdstat_evalsha"]["calls"] == calls


def test_the_ticker_brings_an_urgent_batch_first(tmp_path: Path) -> None:
    """It needs 250 s of what its tenant gets, and has 360."""
    machine = RedisMachine(tmp_path / "redis")
    machine.start()
    try:
        client = connect(machine.url)
        queue = Queue(client)
        batch = begin(client, write_input(tmp_path / "in.jsonl", 100), completion_window_seconds=3600.0).id
        step(client, batch)
        step(client, batch)
        start_batch(queue, "batch_other", 500)
        queue.announce("", "batch_other", listed=False, runs=True)
        client.hset(keys.batch("batch_other"), "line_models", f'["{MODEL}"]')
        client.zincrby(keys.ring(MODEL, ""), 10_000_000, batch)
        leader = Ticker(queue)
        machine.clock.step(3200)
        for tokens in (0, 2200, 4400):
            client.hset(keys.batch("batch_other"), "used_tokens", tokens)
            tick(leader)
            machine.clock.step(20)
        assert queue.batch_fields(batch).risk == "urgent"
        assert [claim.key.batch for claim in queue.claim("w", 1, 16, models=[MODEL])] == [batch] * 16
    finally:
        machine.stop()
