"""A process drives the batches that its records name, whatever Redis lost, and hands them over when
it stops.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from jobs.batch.client import cancel_batch, get_batch
from jobs.control import driver, runner
from jobs.control.driver import Driver
from jobs.control.slice_queue import MOST_OF_TENANT
from jobs.control.slices import Slice
from jobs.control.ticker import Ticker
from jobs.queue import keys
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import hand_out, take_batches, waiting_batches
from tests.support.batch_steps import answer_all, begin, step
from tests.support.control_plane import Answering, write_input
from tests.support.waiting import wait_for_end, wait_until


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
        one._turns.grant()
        one._ended.set()


class Held:
    """Validations that wait, before they do anything, until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.released = threading.Event()
        self._real = runner.WORK["validate"]
        monkeypatch.setitem(runner.WORK, "validate", self._wait)

    def _wait(self, held: Slice) -> object:
        self.begun.append(held.batch)
        self.released.wait(600)
        return self._real(held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.released.set()


@pytest.fixture
def large_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input counts as large."""
    monkeypatch.setattr(driver, "LARGE_BYTES", 1)


def make_batches(client: redis.Redis, folder: Path, count: int, **options: object) -> list[str]:
    return [
        begin(client, write_input(folder / f"{options}{number}" / "in.jsonl", 3), **options).id
        for number in range(count)
    ]


def take_all(one: Driver) -> None:
    while waiting_batches(one.queue):
        one.take_batches()


def ended(client: redis.Redis, batch: str) -> Callable[[], bool]:
    return lambda: get_batch(client, batch).ended


def test_a_batch_of_a_process_that_lives_is_left_to_it(
    redis_client: redis.Redis, tmp_path: Path, held: Held, drivers: Callable[[], Driver]
) -> None:
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


def test_a_process_goes_on_with_what_only_the_record_says_that_it_drives(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, drivers: Callable[[], Driver]
) -> None:
    """The reply to its taking was lost, or Redis went back to a moment before the batch ended."""
    one = drivers()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    assert take_batches(one.queue, 9) == [batch]
    redis_client.hset(keys.batch(batch), "driver", one.name)
    one.start()
    with Answering(redis_url):
        wait_until(ended(redis_client, batch), 60, "the end")


def test_a_thread_that_cannot_begin_costs_its_batch_a_moment(
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    drivers: Callable[[], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, real, refused = drivers(), threading.Thread.start, list[str]()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    one.start()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == batch and not refused:
            refused.append(batch)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Answering(redis_url):
        take_all(one)
        wait_until(ended(redis_client, batch), 60, "the end")
    assert refused == [batch]


def test_an_error_that_nobody_expected_ends_no_thread_of_the_process(
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    drivers: Callable[[], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, real, raised = drivers(), driver.needs_slice, threading.Event()

    def fail_once(*arguments: object) -> bool:
        if not raised.is_set():
            raised.set()
            raise ValueError("a record of another kind")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "needs_slice", fail_once)
    (batch,) = make_batches(redis_client, tmp_path, 1)
    take_all(one)
    one.start()
    wait_until(raised.is_set, 60, "the error")
    redis_client.delete(keys.control(keys.JOBS_CONTROL))
    assert answer_all(redis_client) == 3
    redis_client.delete(keys.control(keys.JOBS_CONTROL))  # what asked for a slice is lost
    wait_until(ended(redis_client, batch), 60, "the end")


def test_a_cancelled_batch_does_not_wait_for_large_ones(
    redis_client: redis.Redis,
    tmp_path: Path,
    held: Held,
    drivers: Callable[[], Driver],
    large_inputs: None,
) -> None:
    one, most = drivers(), MOST_OF_TENANT[True]
    batches = make_batches(redis_client, tmp_path, most + 1)
    one.start()
    take_all(one)
    wait_until(lambda: len(held.begun) == most, 60, "all that may begin")
    (left,) = set(batches) - set(held.begun)
    cancel_batch(redis_client, left)
    wait_until(ended(redis_client, left), 60, "the end of the cancelled one")
    assert len(held.begun) == most


def test_a_long_slice_ends_where_its_batch_is_cancelled(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: Callable[[], Driver]
) -> None:
    begun, released = threading.Event(), threading.Event()

    def never_done(held: Slice) -> None:
        begun.set()
        while not released.wait(0.01):
            held.check_current()

    monkeypatch.setitem(runner.WORK, "validate", never_done)
    (batch,) = make_batches(redis_client, tmp_path, 1)
    one = drivers()
    one.start()
    take_all(one)
    assert begun.wait(60)
    try:
        cancel_batch(redis_client, batch)
        wait_until(ended(redis_client, batch), 60, "the end of the batch")
    finally:
        released.set()


def test_a_look_while_batches_are_taken_lets_no_more_large_ones_begin(
    redis_client: redis.Redis,
    tmp_path: Path,
    held: Held,
    drivers: Callable[[], Driver],
    large_inputs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, most = drivers(), MOST_OF_TENANT[True]
    read = one.queue.some_active_batches

    def read_and_take(cursor: int, count: int) -> tuple[int, dict[str, BatchStatus]]:
        found = read(cursor, count)
        take_all(one)
        return found

    monkeypatch.setattr(one.queue, "some_active_batches", read_and_take)
    make_batches(redis_client, tmp_path, most + 3)
    one._look_after_all()
    assert len(one._slices.running) == most


def test_what_fails_again_and_again_is_tried_ever_less(
    redis_client: redis.Redis, tmp_path: Path, drivers: Callable[[], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tries = drivers(), list[float]()

    def fail(held: Slice) -> None:
        tries.append(time.monotonic())
        raise OSError("the disk is broken")

    monkeypatch.setitem(runner.WORK, "validate", fail)
    (batch,) = make_batches(redis_client, tmp_path, 1)
    take_all(one)
    one.start()
    wait_until(lambda: len(tries) >= 3, 60, "some tries")
    assert tries[1] - tries[0] >= 1.0
    assert tries[2] - tries[1] >= 2.0
    assert "the disk is broken" in str(get_batch(redis_client, batch).problem)


def test_a_stop_drains_and_hands_the_batches_over(
    redis_client: redis.Redis, tmp_path: Path, drivers: Callable[[], Driver]
) -> None:
    queue, one = Queue(redis_client), drivers()
    (batch,) = make_batches(redis_client, tmp_path, 1)
    take_all(one)
    wait_until(lambda: queue.batch_fields(batch).state == "in_progress", 60, "it is validated")
    wait_until(lambda: not one._slices.running, 60, "no slice runs")
    one.stopping.set()
    assert answer_all(redis_client, most=2) == 2
    one.stop()
    assert queue.results(batch) == []
    assert (queue.batch_fields(batch).driver, waiting_batches(queue)) == ("", {batch})
    assert queue.batch_fields(batch).generation == 1


def test_a_process_that_is_told_to_stop_as_it_takes_batches_adopts_no_more_of_them(
    redis_client: redis.Redis, tmp_path: Path, drivers: Callable[[], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take as long as Redis needs to answer, if it does."""
    one, adopted = drivers(), list[str]()

    def adopt(batch: str) -> None:
        adopted.append(batch)
        one.stopping.set()

    monkeypatch.setattr(one, "_adopt", adopt)
    batches = make_batches(redis_client, tmp_path, 3)
    one.take_batches()
    assert len(adopted) == 1
    Ticker(one.queue).tick()
    assert waiting_batches(one.queue) == set(batches)


def test_a_stop_waits_for_no_slice_that_is_stuck(
    redis_client: redis.Redis,
    tmp_path: Path,
    held: Held,
    drivers: Callable[[], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr("jobs.control.slice_queue.STUCK_SECONDS", 600.0)  # until then they make no room for others
    queue, one = Queue(redis_client), drivers()
    batches = make_batches(redis_client, tmp_path, MOST_OF_TENANT[False] + 2)
    one.start()
    take_all(one)
    wait_until(lambda: len(held.begun) == MOST_OF_TENANT[False], 60, "all that may begin")
    wait_for_end(one.stop, 60, "the stop")
    assert waiting_batches(queue) == set(batches)
    assert {queue.batch_fields(batch).driver for batch in batches} == {""}


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
