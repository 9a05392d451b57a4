"""A process drives the batches that it took, some slices at a time, and hands them over when it
stops.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from jobs.control import driver, runner
from jobs.control.driver import _MOST, _MOST_OF_TENANT, Driver
from jobs.control.slices import Slice
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import hand_out, waiting_batches
from tests.support.batch_steps import answer_all, begin, step
from tests.support.control_plane import write_input
from tests.support.waiting import wait_until


@pytest.fixture
def drivers(redis_client: redis.Redis) -> Iterator[Callable[[], Driver]]:
    """Makes drivers, which stop at the end of the test."""
    made: list[Driver] = []

    def make() -> Driver:
        made.append(Driver(Queue(redis_client)))
        return made[-1]

    yield make
    for one in made:
        one.stopping.set()


class Stuck:
    """Slices that begin and do not end before they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.end = threading.Event()
        monkeypatch.setattr(driver.Runner, "run", self._run)

    def _run(self, batch: str, pause: object) -> str:
        self.begun.append(batch)
        self.end.wait(600)
        return "wait"


def make_batches(client: redis.Redis, folder: Path, count: int, **options: object) -> list[str]:
    return [
        begin(client, write_input(folder / f"{options}{number}" / "in.jsonl", 3), **options).id
        for number in range(count)
    ]


def take_all(one: Driver) -> None:
    while waiting_batches(one.queue):
        one.take_batches()


def test_a_tenant_has_some_slices_at_once_and_leaves_room_for_others(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    stuck, one = Stuck(monkeypatch), drivers()
    first = make_batches(redis_client, tmp_path, _MOST_OF_TENANT[False] + 3, tenant="first")
    take_all(one)
    wait_until(lambda: len(stuck.begun) == _MOST_OF_TENANT[False], 60, "all that may begin")
    (second,) = make_batches(redis_client, tmp_path, 1, tenant="second")
    take_all(one)
    wait_until(lambda: second in stuck.begun, 60, "the other tenant's to begin")
    assert len(stuck.begun) == _MOST_OF_TENANT[False] + 1
    stuck.end.set()
    wait_until(lambda: set(first) <= set(stuck.begun), 60, "the rest to begin")


def test_slices_that_are_stuck_take_no_room_of_others(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    stuck, one = Stuck(monkeypatch), drivers()
    monkeypatch.setattr(driver, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(driver, "MOST_STUCK", 2 * _MOST_OF_TENANT[False])
    make_batches(redis_client, tmp_path, 3 * _MOST_OF_TENANT[False], tenant="first")
    take_all(one)
    one.start()
    wait_until(lambda: len(stuck.begun) == 2 * _MOST_OF_TENANT[False], 60, "as many as may be stuck")
    one.stopping.set()
    stuck.end.set()
    one.stop()
    assert len(stuck.begun) == 2 * _MOST_OF_TENANT[False]


def test_large_inputs_are_validated_a_few_at_a_time(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    stuck, one = Stuck(monkeypatch), drivers()
    monkeypatch.setattr(driver, "LARGE_BYTES", 1)
    tenants = -(-_MOST[True] // _MOST_OF_TENANT[True])
    for number in range(tenants + 1):
        make_batches(redis_client, tmp_path, _MOST_OF_TENANT[True] + 1, tenant=f"t{number}")
    take_all(one)
    wait_until(lambda: len(stuck.begun) == _MOST[True], 60, "all that may begin")
    monkeypatch.setattr(driver, "LARGE_BYTES", 1 << 30)
    (small,) = make_batches(redis_client, tmp_path, 1, tenant="small")
    take_all(one)
    wait_until(lambda: small in stuck.begun, 60, "the small one to begin")
    assert len(stuck.begun) == _MOST[True] + 1
    stuck.end.set()


def test_what_asks_for_a_slice_while_one_runs_gets_one_more(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    stuck, one = Stuck(monkeypatch), drivers()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    take_all(one)
    wait_until(lambda: stuck.begun == [batch], 60, "its slice to begin")
    for _ in range(3):
        one._wake([batch, "unknown"])
    assert stuck.begun == [batch]
    stuck.end.set()
    wait_until(lambda: stuck.begun == [batch] * 2, 60, "one more")


def test_a_batch_of_a_process_that_lives_is_left_to_it(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    Stuck(monkeypatch)
    queue, one, two, three = Queue(redis_client), drivers(), drivers(), drivers()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    one.take_batches()
    redis_client.set(keys.driver(one.name), 1)
    hand_out(queue, batch)
    two.take_batches()
    assert queue.batch_fields(batch).driver == one.name
    redis_client.delete(keys.driver(one.name))
    hand_out(queue, batch)
    three.take_batches()
    assert queue.batch_fields(batch).driver == three.name


def test_a_stop_drains_and_hands_the_batches_over(
    redis_client: redis.Redis, tmp_path: Path, drivers: Callable[[], Driver]
) -> None:
    queue, one = Queue(redis_client), drivers()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    take_all(one)
    one.start()
    wait_until(lambda: queue.batch_fields(batch).state == "in_progress", 60, "it is validated")
    wait_until(lambda: not one._running, 60, "no slice runs")
    one.stopping.set()
    assert answer_all(redis_client, most=2) == 2
    one.stop()
    assert queue.results(batch) == []
    assert (queue.batch_fields(batch).driver, waiting_batches(queue)) == ("", {batch})
    assert queue.batch_fields(batch).generation == 1


def test_a_slice_that_the_cancel_of_its_batch_ended_is_followed_by_one_that_ends_it(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = make_batches(redis_client, tmp_path, 1)
    redis_client.hset(keys.batch(batch), "driver", "mine")
    one = runner.Runner(Queue(redis_client), "mine")
    real = runner.WORK["validate"]

    def cancel_first(held: Slice) -> object:
        assert runner.begin_cancel(held.queue, held.batch, held.generation)
        return real(held)

    monkeypatch.setitem(runner.WORK, "validate", cancel_first)
    assert one.run(batch) == "wait"
    assert one.run(batch) == "drop"
    assert step(redis_client, batch).state == "cancelled"
