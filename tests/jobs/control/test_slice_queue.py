"""A tenant's slices leave room for those of others, stuck or not."""

import time

import pytest

from jobs.control import slice_queue
from jobs.control.slice_queue import MOST_LARGE, MOST_OF_TENANT, MOST_STUCK_OF_TENANT, Driven, SliceQueue
from jobs.control.turns import Turn


def begun(slices: SliceQueue) -> list[Driven]:
    """All that may begin now."""
    found = []
    while (driven := slices.begin_next()) is not None:
        driven.turn = Turn(driven.tenant, driven.batch)
        found.append(driven)
    return found


def ask(slices: SliceQueue, tenant: str, count: int, is_large: bool = False) -> None:
    for number in range(count):
        slices.ask_for(Driven(f"{tenant}{number}", tenant, is_large))


def be_stuck(running: list[Driven]) -> None:
    for driven in running:
        assert driven.turn is not None
        driven.turn.began = time.monotonic() - 2 * slice_queue.STUCK_SECONDS
        driven.turn.granted.set()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_tenant_has_some_at_once(is_large: bool) -> None:
    slices, most = SliceQueue(lambda tenant: 0.0), MOST_OF_TENANT[is_large]
    ask(slices, "first", most + 2, is_large)
    first = begun(slices)
    assert [driven.batch for driven in first] == [f"first{number}" for number in range(most)]
    ask(slices, "second", 1, is_large)
    assert [driven.tenant for driven in begun(slices)] == ["second"]
    slices.end(first[0])
    assert [driven.batch for driven in begun(slices)] == [f"first{most}"]


def test_large_ones_are_few_in_all_and_leave_room_for_small_ones() -> None:
    slices = SliceQueue(lambda tenant: 0.0)
    for tenant in ("a", "b", "c"):
        ask(slices, tenant, MOST_OF_TENANT[True], is_large=True)
    assert len(begun(slices)) == MOST_LARGE
    ask(slices, "a", 1)
    assert [driven.is_large for driven in begun(slices)] == [False]


def test_the_least_served_tenant_is_next() -> None:
    served = {"much": 9.0, "some": 2.0, "none": 0.0}
    slices = SliceQueue(served.__getitem__)
    for tenant in served:
        ask(slices, tenant, 1)
    assert [driven.tenant for driven in begun(slices)] == ["none", "some", "much"]


def test_stuck_slices_take_no_room_up_to_a_limit_of_their_tenant() -> None:
    slices = SliceQueue(lambda tenant: 0.0)
    ask(slices, "first", 3 * MOST_STUCK_OF_TENANT)
    rounds = MOST_STUCK_OF_TENANT // MOST_OF_TENANT[False]
    for _ in range(rounds):
        running = begun(slices)
        assert len(running) == MOST_OF_TENANT[False]
        be_stuck(running)
        assert len(slices.note_stuck()) == len(running)
        assert slices.note_stuck() == []
    assert begun(slices) == []
    ask(slices, "second", 1)
    assert len(begun(slices)) == 1
    for driven in list(slices.running):
        slices.end(driven)
    assert len(begun(slices)) == MOST_OF_TENANT[False]


def test_large_ones_that_are_stuck_keep_their_room() -> None:
    slices = SliceQueue(lambda tenant: 0.0)
    ask(slices, "first", MOST_OF_TENANT[True] + 1, is_large=True)
    be_stuck(begun(slices))
    assert slices.note_stuck() == []
    assert begun(slices) == []


def test_one_that_is_asked_for_while_it_runs_is_wanted_once_more() -> None:
    slices, driven = SliceQueue(lambda tenant: 0.0), Driven("batch", "tenant")
    for _ in range(3):
        slices.ask_for(driven)
    assert begun(slices) == [driven]
    assert not driven.is_wanted
    slices.ask_for(driven)
    assert begun(slices) == []
    assert driven.is_wanted


@pytest.mark.parametrize("is_waiting", [False, True])
def test_one_without_a_large_input_any_more_waits_with_the_small_ones(is_waiting: bool) -> None:
    slices = SliceQueue(lambda tenant: 0.0)
    ask(slices, "tenant", MOST_OF_TENANT[True], is_large=True)
    begun(slices)
    driven = Driven("batch", "tenant", is_large=True)
    if is_waiting:
        slices.ask_for(driven)
    assert begun(slices) == []
    slices.make_small(driven)
    assert begun(slices) == ([driven] if is_waiting else [])
    assert not driven.is_large
