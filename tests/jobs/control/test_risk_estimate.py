"""Risks in a closed loop: the rates of simulated tenants decide which batches are at risk, and the
risks whose lines finish.
"""

from collections.abc import Callable, Collection

import pytest
from msgspec.structs import replace

from jobs.control.deadlines import JUDGE_SECONDS, LOST_JUDGEMENTS, RATE_SECONDS, RiskEstimate
from jobs.queue.batch_fields import BatchStatus, Risk

COST = 256  # tokens of a line
ENDLESS = 10**9


class Tenant:
    """One tenant's batches. Each model finishes `rate(seconds)` lines a second of urgent batches,
    the earliest end first, or of all in equal shares.
    """

    def __init__(self, rate: Callable[[float], float], every: float = JUDGE_SECONDS) -> None:
        self.records: dict[str, BatchStatus] = {}
        self.seen: dict[str, list[Risk]] = {}
        self.served: Collection[str] = ("a", "b")
        self._rate, self._every = rate, every  # seconds between finishes
        self._estimate, self._now, self._finished_at = RiskEstimate(), 0.0, 0.0

    def add(self, batch: str, lines: int, window: float | None = None, models: str = "a") -> None:
        ends = {} if window is None else {"expires_at": self._now + window}
        self.records[batch] = BatchStatus(state="in_progress", total=lines, line_models=list(models), **ends)
        self.seen[batch] = []

    def run_until(self, end: float) -> None:
        while self._now < end:
            self._now += JUDGE_SECONDS
            if self._now - self._finished_at >= self._every:
                for model in ("a", "b"):
                    self._finish(model, self._rate(self._now) * (self._now - self._finished_at))
                self._finished_at = self._now
            for batch, risk in self._estimate.judge(self.records, set(self.served), self._now).items():
                self.records[batch] = replace(self.records[batch], risk=risk)
                if not self.seen[batch] or self.seen[batch][-1] != risk:
                    self.seen[batch].append(risk)

    def state(self, batch: str) -> str:
        return self.records[batch].state

    def _finish(self, model: str, lines: float) -> None:
        waiting = {batch: one for batch, one in self.records.items() if model in one.line_models and not one.all_done}
        waiting = {batch: one for batch, one in waiting.items() if one.expires_at >= self._now}
        urgent = sorted((one.expires_at, batch) for batch, one in waiting.items() if one.risk == "urgent")
        for batch in [urgent[0][1]] if urgent else waiting:
            one = waiting[batch]
            done = min(int(lines / (1 if urgent else len(waiting))), one.total - one.finished)
            counts = {"used_lines": one.used_lines + done, "used_tokens": one.used_tokens + done * COST}
            one = replace(one, completed=one.completed + done, **counts)
            self.records[batch] = replace(one, state="completed") if one.all_done else one


def dip(low: float, begin: float, end: float, rate: float = 10.0) -> Callable[[float], float]:
    return lambda now: low if begin <= now < end else rate


@pytest.mark.parametrize("low", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("begin", [20, 300, 600])
@pytest.mark.parametrize("seconds", [30, 90])
def test_a_short_dip_costs_no_batch_its_deadline(low: float, begin: float, seconds: float) -> None:
    tenant = Tenant(dip(low, begin, begin + seconds))
    tenant.add("endless", ENDLESS)
    tenant.add("a", 9000, 1100)
    tenant.run_until(1100)
    assert tenant.state("a") == "completed"
    assert "late" not in tenant.seen["a"]


def test_a_batch_that_was_given_up_is_saved_once_it_can_be() -> None:
    dip_seconds = 2 * LOST_JUDGEMENTS * JUDGE_SECONDS
    tenant = Tenant(dip(2.0, 300, 300 + dip_seconds))
    tenant.add("endless", ENDLESS)
    tenant.add("a", 12_000, 2000)
    tenant.run_until(2000)
    assert tenant.seen["a"][:4] == ["", "urgent", "late", "urgent"]
    assert tenant.state("a") == "completed"


def test_a_batch_that_stays_lost_is_given_up_once_for_one_that_can_be_saved() -> None:
    """The rate is halved for good."""
    tenant = Tenant(dip(5.0, 300, ENDLESS))
    tenant.add("endless", ENDLESS)
    tenant.add("lost", 12_000, 1300)
    tenant.add("saved", 3000, 2000)
    tenant.run_until(2000)
    assert tenant.seen["lost"] == ["", "urgent", "late"]
    assert tenant.state("saved") == "completed"


def test_a_batch_that_looks_late_at_first_is_saved_when_the_rate_rises() -> None:
    tenant = Tenant(dip(1.0, 0, 200))
    tenant.add("endless", ENDLESS)
    tenant.add("a", 7000, 1100)
    tenant.run_until(1100)
    assert tenant.seen["a"][:3] == ["", "late", "urgent"]
    assert tenant.state("a") == "completed"


def test_the_end_of_a_bigger_batch_makes_no_other_late() -> None:
    """The tenant's rate stays; the other batch gets it from then on."""
    tenant = Tenant(lambda _: 10)
    tenant.add("big", 2000, 390)
    tenant.run_until(20)
    tenant.add("a", 6000, 2000)
    tenant.run_until(2000)
    assert tenant.state("big") == tenant.state("a") == "completed"
    assert "late" not in tenant.seen["a"]


def test_a_rate_outlives_the_tenants_batches() -> None:
    tenant = Tenant(lambda _: 10)
    tenant.add("old", 600)
    tenant.run_until(300)
    assert tenant.state("old") == "completed"
    tenant.add("endless", ENDLESS)
    tenant.add("a", 900, 150)
    tenant.run_until(300 + JUDGE_SECONDS)
    assert tenant.seen["a"] == ["urgent"], "though it has no rate of its own yet"
    tenant.run_until(450)
    assert tenant.state("a") == "completed"


@pytest.mark.parametrize("every", [70, 600])
def test_lines_that_finish_in_bursts_have_a_rate(every: float) -> None:
    tenant = Tenant(lambda _: 1, every)
    tenant.add("endless", ENDLESS)
    tenant.add("a", 20 * int(every), 30 * every)
    tenant.run_until(30 * every)
    assert tenant.seen["a"] == ["", "urgent", ""]
    assert tenant.state("a") == "completed"


def test_a_time_without_workers_is_no_rate() -> None:
    tenant = Tenant(dip(0, 1000, 2000))
    tenant.add("endless", ENDLESS)
    tenant.add("a", 30_000, 20_000)
    tenant.run_until(1000)
    tenant.served = ()
    tenant.run_until(2000)
    tenant.served = ("a", "b")
    tenant.run_until(2000 + 2 * RATE_SECONDS)
    assert tenant.seen["a"] == [""]


class TestSeveralModels:
    def test_batches_on_other_models_make_none_late(self) -> None:
        """Each model's batches have their own rate and their own queue."""
        tenant = Tenant(lambda _: 10)
        tenant.add("slow", 30_000, 4000)
        tenant.add("both", 1000, 4100, models="ab")
        tenant.add("y", 15_000, 4200, models="b")
        tenant.add("endless", ENDLESS, models="b")
        tenant.run_until(4200)
        assert all("late" not in risks for risks in tenant.seen.values())
        assert {batch for batch in tenant.seen if tenant.state(batch) == "completed"} == {"slow", "both", "y"}

    def test_a_batch_that_shares_its_model_with_one_on_several_can_be_saved(self) -> None:
        """How much of the other's lines is of this model is not known."""
        tenant = Tenant(lambda _: 4)
        tenant.add("endless", ENDLESS, models="ab")
        tenant.add("y", 12_000, 4400)
        tenant.run_until(4400)
        assert tenant.state("y") == "completed"
        assert "late" not in tenant.seen["y"]
