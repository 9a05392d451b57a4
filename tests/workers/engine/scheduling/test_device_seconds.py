"""Each step's time is divided among its requests by their tokens, whatever becomes of them."""

import itertools
import random
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.workers.engine.scheduling.test_scheduler import ended, finish, make_scheduler, plan_of, request, step
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.scheduler import Scheduler


def shares(scheduler: Scheduler, plan: StepPlan, seconds: float) -> Iterator[tuple[int, float]]:
    """Yield what each request in a step that was just planned is to get of it."""
    names = {each.slot: each.id for each in scheduler._queues.running}
    for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True):
        yield names[slot], seconds * count / int(plan.counts.sum())


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("round_", range(5))
def test_nothing_is_lost_by_chunks_preemptions_and_returns(depth: int, round_: int, by_text: bool) -> None:
    """Requests that their text may end are reported with each token, also those just preempted."""
    draw = random.Random(round_)
    scheduler = make_scheduler(seqs=4, budget=9, blocks=13, depth=depth)
    for number in range(10):
        added = request(number, draw.randrange(1, 20), draw.randrange(5, 15))
        scheduler.add(msgspec.structs.replace(added, stop_strings=by_text))
    expected: dict[int, float] = {}
    found: dict[int, float] = {}
    launched: deque[tuple[StepPlan, float]] = deque()
    for turn in itertools.count():
        if not (scheduler.unfinished or launched):
            break
        if turn == 8:
            scheduler.add(request(10, live=True))
            scheduler.add(request(11, live=True))
        plan = scheduler.schedule()
        if plan is not None:
            launched.append((plan, draw.random()))
            for number, share in shares(scheduler, *launched[-1]):
                expected[number] = expected.get(number, 0.0) + share
        if launched and (plan is None or len(launched) > depth):
            retired, seconds = launched.popleft()
            scheduler.charge(retired, seconds)
            output = finish(scheduler, retired)
            going_on = {number for number in output.request_ids if by_text and number < 10}
            assert output.device_seconds.keys() == ended(output).keys() | going_on
            assert all(found.get(number, 0.0) <= seconds for number, seconds in output.device_seconds.items())
            assert all(seconds <= expected[number] * 1.000001 for number, seconds in output.device_seconds.items())
            found |= output.device_seconds
    assert scheduler._stats.preemptions > 0
    assert found == pytest.approx(expected)


def test_a_step_behind_the_last_token_counts_for_no_one() -> None:
    """At depth 1 it was launched before the stop token was known."""
    scheduler = make_scheduler(depth=1)
    scheduler.add(request(1))
    plans = [plan_of(scheduler)]
    plans.append(plan_of(scheduler))
    scheduler.charge(plans[0], 2.0)
    assert finish(scheduler, plans[0], token=98).device_seconds == {1: 2.0}
    scheduler.charge(plans[1], 4.0)
    assert finish(scheduler, plans[1]).device_seconds == {}
    scheduler.add(request(2))
    plan = plan_of(scheduler)
    scheduler.charge(plan, 8.0)
    assert finish(scheduler, plan, token=98).device_seconds == {2: 8.0}, "the next in the slot has its own"


def test_a_request_that_its_text_may_end_reports_what_it_took_so_far() -> None:
    scheduler = make_scheduler()
    scheduler.add(EngineRequest(1, [1, 1], [], SamplingParams(9), stop_strings=True))
    scheduler.add(EngineRequest(2, [2, 2], [], SamplingParams(2)))
    for so_far, other in ((1.0, {}), (2.0, {2: 2.0})):
        plan = plan_of(scheduler)
        scheduler.charge(plan, 2.0)
        assert finish(scheduler, plan).device_seconds == {1: so_far} | other
    scheduler.abort([1])
    assert ended(scheduler.ended()) == {1: Finish.ABORT}
    scheduler.add(request(3))
    assert step(scheduler).device_seconds == {}


def test_a_step_that_was_not_launched_takes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, max_tokens=1))
    scheduler.undo(plan_of(scheduler))
    plan = plan_of(scheduler)
    scheduler.charge(plan, 3.0)
    output = scheduler.update(plan, StepResult(np.array([7], dtype=np.int32)))
    assert output.device_seconds == {1: 3.0}
