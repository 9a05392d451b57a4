"""Turns are passed on, to the least served tenant, and are not lost to a job that waits."""

import threading
from collections.abc import Iterator

import pytest

from jobs.control import turns
from jobs.control.turns import Turn, Turns
from tests.support.waiting import wait_until


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "AT_ONCE", 1)
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(turns, "OVERRUN_SECONDS", 600.0)


class Job:
    """A thread that takes a turn, which `end` gives up."""

    def __init__(self, shared: Turns, tenant: str, batch: str, used: float = 0.0) -> None:
        self._shared, self._asked = shared, Turn(tenant, batch, used=used)
        self.turn: Turn | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._shared.take(self._asked)
        self.turn = turn = self._asked
        self._end.wait(600)
        self._shared.end(turn)

    def end(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def waiting(shared: Turns, count: int) -> None:
    wait_until(lambda: len(shared._waiting) == count, 60, f"{count} to wait")


def has_turn(job: Job) -> None:
    wait_until(lambda: job.turn is not None, 60, "its turn")


def test_the_least_served_tenant_is_next_then_its_least_served_batch(stopping: threading.Event) -> None:
    shared = Turns(stopping)
    shared._tenants.add("much", 9.0)
    shared._tenants.add("little", 1.0)
    shared._batches.add("old", 1000.0)
    running = Job(shared, "much", "first")
    has_turn(running)
    jobs = []
    for count, names in enumerate([("much", "second"), ("little", "old"), ("little", "new")], 1):
        jobs.append(Job(shared, *names))
        waiting(shared, count)
    for job in (jobs[2], jobs[1], jobs[0]):
        assert job.turn is None
        running.end()
        has_turn(job)
        running = job
    running.end()


def test_a_job_passes_its_turn_on_at_a_check_and_gets_another(stopping: threading.Event) -> None:
    shared = Turns(stopping)
    mine = Turn("mine", "first")
    shared.take(mine)
    shared.pass_on(mine)
    other = Job(shared, "other", "second")
    waiting(shared, 1)
    passing = threading.Thread(target=shared.pass_on, args=(mine,), daemon=True)
    passing.start()
    has_turn(other)
    waiting(shared, 1)
    other.end()
    passing.join(60)
    assert not passing.is_alive()


def test_a_job_that_comes_to_no_check_holds_up_no_other(
    stopping: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "OVERRUN_SECONDS", 0.05)
    shared = Turns(stopping)
    threading.Thread(target=shared.watch, daemon=True).start()
    shared.take(Turn("stuck", "first"))
    has_turn(other := Job(shared, "other", "second"))
    other.end()


def test_short_slices_leave_long_ones_some_turns_and_get_more(
    stopping: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "AT_ONCE", 3)
    monkeypatch.setattr(turns, "LONG_AT_ONCE", 1)
    shared = Turns(stopping)
    shared.take(Turn("long", "first", used=9.0))
    second = Job(shared, "long", "second", used=9.0)
    waiting(shared, 1)
    short = [Job(shared, "short", str(number)) for number in range(2)]
    for job in short:
        has_turn(job)
    assert second.turn is None
    for job in short:
        job.end()
    assert second.turn is None


def test_all_that_wait_go_on_when_the_process_stops(stopping: threading.Event) -> None:
    shared = Turns(stopping)
    shared.take(Turn("mine", "first"))
    jobs = [Job(shared, "mine", str(number)) for number in range(3)]
    waiting(shared, 3)
    stopping.set()
    shared.grant()
    for job in jobs:
        has_turn(job)
        job.end()
