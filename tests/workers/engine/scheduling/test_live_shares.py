"""Slots of live requests when not all can run: tenants share by weight, and calls share too."""

from collections import Counter

import pytest

from tests.workers.engine.scheduling.timed import TimedEngine
from workers.engine.messages.core import LiveShare

SLOTS = 16
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def fill(
    engine: TimedEngine, tenant: str, count: int, output: int = 400, prompt: int = 20, weight: float = 1.0
) -> None:
    """Calls of a single choice."""
    for number in range(count):
        engine.add(prompt, output, live=True, share=LiveShare(tenant, f"{tenant}{number}", weight))


def running(engine: TimedEngine) -> Counter[str]:
    return Counter(request.tenant for request in engine.scheduler._queues.live.running)


def preemptions(engine: TimedEngine) -> int:
    return engine.scheduler._stats.preemptions


def turns(engine: TimedEngine, count: int) -> None:
    for _ in range(count):
        engine.turn()


@DEPTHS
@pytest.mark.parametrize("waiting", [0, 100])
def test_a_call_of_another_tenant_gets_the_slot_of_the_newest(waiting: int, depth: int) -> None:
    engine = TimedEngine(slots=SLOTS, depth=depth)
    fill(engine, "a", SLOTS + waiting)
    turns(engine, 10)
    steps = len(engine.steps)
    call = engine.add(20, 4, live=True, share=LiveShare("b", "b"))
    while not call.tokens:
        engine.turn()
    assert len(engine.steps) - steps <= 1 + 3 * depth
    assert preemptions(engine) == 1
    assert running(engine) == {"a": SLOTS - 1, "b": 1}
    engine.run_dry()
    assert preemptions(engine) == 1
    assert all(len(each.tokens) == 400 for each in engine.calls if each is not call)


@DEPTHS
@pytest.mark.parametrize(("weight", "share"), [(1.0, 8), (3.0, 12), (0.34, 4)])
def test_tenants_share_the_slots_by_weight_and_then_keep_them(weight: float, share: int, depth: int) -> None:
    engine = TimedEngine(slots=SLOTS, depth=depth)
    fill(engine, "a", 100)
    turns(engine, 10)
    fill(engine, "b", 100, weight=weight)
    turns(engine, 60)
    assert running(engine) == {"a": SLOTS - share, "b": share}
    taken = preemptions(engine)
    turns(engine, 200)
    assert preemptions(engine) == taken == share
    assert running(engine)["b"] == share


def test_a_tenant_of_little_weight_has_a_slot() -> None:
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 100)
    turns(engine, 10)
    fill(engine, "b", 3, weight=0.01)
    turns(engine, 10)
    assert running(engine) == {"a": SLOTS - 1, "b": 1}


def test_many_tenants_begin_together() -> None:
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 100)
    turns(engine, 10)
    calls = [engine.add(20, 4, live=True, share=LiveShare(f"t{number}", f"t{number}")) for number in range(SLOTS - 1)]
    turns(engine, 2)
    assert all(call.tokens for call in calls)


def test_thousands_that_wait_delay_a_call_by_a_few_steps() -> None:
    """Their places are not counted anew in each step."""
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 3000)
    fill(engine, "c", 100)
    turns(engine, 20)
    for _ in range(3):
        steps = len(engine.steps)
        call = engine.add(20, 4, live=True, share=LiveShare("b", "b"))
        while not call.tokens:
            engine.turn()
        assert len(engine.steps) - steps <= 2 + 3100 // 512
        turns(engine, 10)


def test_what_another_tenant_leaves_is_used() -> None:
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 100)
    fill(engine, "b", 3)
    turns(engine, 10)
    assert running(engine) == {"a": SLOTS - 3, "b": 3}


@DEPTHS
def test_the_choices_of_one_call_make_room_for_other_calls_of_its_tenant(depth: int) -> None:
    engine = TimedEngine(slots=SLOTS, depth=depth)
    for _ in range(2 * SLOTS):
        engine.add(20, 400, live=True, share=LiveShare("a", "large"))
    turns(engine, 10)
    steps = len(engine.steps)
    call = engine.add(20, 4, live=True, share=LiveShare("a", "small"))
    while not call.tokens:
        engine.turn()
    assert len(engine.steps) - steps <= 1 + 3 * depth


def test_calls_of_a_few_choices_take_nothing_from_each_other() -> None:
    engine = TimedEngine(slots=SLOTS)
    for number in range(40):
        for _ in range(2):
            engine.add(20, 50, live=True, share=LiveShare("a", f"a{number}"))
    engine.run_dry()
    assert preemptions(engine) == 0
    firsts = [call.tokens[0] for call in engine.calls]
    assert firsts == sorted(firsts)


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_another_tenant() -> None:
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 6, prompt=3000)
    turns(engine, 6)
    steps = len(engine.steps)
    call = engine.add(20, 4, live=True, share=LiveShare("b", "b"))
    while not call.tokens:
        engine.turn()
    assert len(engine.steps) - steps <= 2
    engine.run_dry()


@DEPTHS
def test_blocks_beyond_a_tenants_share_are_taken_back_too(depth: int) -> None:
    """Eight of the sixteen slots hold all blocks."""
    engine = TimedEngine(slots=SLOTS, depth=depth, blocks=8 * 10 + 1)
    fill(engine, "a", 8, prompt=130, output=25)
    turns(engine, 10)
    calls = [engine.add(40, 4, live=True, share=LiveShare("b", f"b{number}")) for number in range(2)]
    steps = len(engine.steps)
    while not all(call.tokens for call in calls):
        engine.turn()
    assert len(engine.steps) - steps <= 4 + 4 * depth
    assert running(engine)["a"] >= 6
    engine.run_dry()


def test_a_tenant_alone_takes_turns_by_arrival_again() -> None:
    engine = TimedEngine(slots=SLOTS)
    fill(engine, "a", 20, output=30)
    fill(engine, "b", 2, output=2)
    turns(engine, 12)
    fill(engine, "a", 30, output=3)
    engine.run_dry()
    firsts = [call.tokens[0] for call in engine.calls[:20] + engine.calls[22:]]
    assert firsts == sorted(firsts)
