"""Batches to which nothing happens cost the same each second, however many there are."""

import time
from typing import Any

import pytest
import redis

from jobs.control.driver import Driver
from jobs.control.rounds import Rounds
from jobs.control.slice_queue import Driven
from jobs.control.ticker import Ticker
from jobs.queue import keys
from jobs.queue.request_queue import Queue


def make_idle(queue: Queue, names: list[str], driver: str = "one") -> None:
    """Batches whose lines all wait for a worker."""
    with queue.redis.pipeline(transaction=False) as pipeline:
        for name in names:
            counts = {"total": 3, "cursor": 3, "low_water": -1, "generation": 0}
            record = {"state": "in_progress", "driver": driver, "tenant": "t", **counts}
            pipeline.hset(keys.batch(name), mapping=record)  # type: ignore[arg-type]
            pipeline.sadd(keys.ACTIVE, name)
        pipeline.execute()


def commands(client: redis.Redis) -> int:
    info: Any = client.info("stats")
    return int(info["total_commands_processed"])


@pytest.mark.parametrize("process", ["driver", "ticker"])
def test_a_second_of_idle_batches_costs_the_same(redis_client: redis.Redis, process: str) -> None:
    queue = Queue(redis_client)
    ticker, driver = Ticker(queue), Driver(queue)
    redis_client.set(keys.driver("one"), 1, ex=5)
    driver.name = "one"
    costs = []
    for first, end in ((0, 600), (600, 6000)):
        names = [f"batch_{number}" for number in range(first, end)]
        make_idle(queue, names)
        driver._batches |= {name: Driven(name, "t", not_before=time.monotonic() + 600) for name in names}
        looks = []
        for _ in range(5):
            before = commands(redis_client)
            ticker.tick() if process == "ticker" else driver._look_after_all()
            looks.append(commands(redis_client) - before)
        costs.append(sum(looks) / 5)
    print(costs)
    assert costs[1] < 1.3 * costs[0] < 500


def test_a_round_reads_each_batch_and_names_those_that_are_gone(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client)
    names = {f"batch_{number}" for number in range(450)}
    make_idle(queue, sorted(names))
    rounds = Rounds(queue, 100)
    for known in ({"batch_1", "batch_x"}, names):
        seen: set[str] = set()
        looks = 0
        while True:
            look = rounds.look(known)
            seen |= look.records.keys()
            looks += 1
            if not rounds._cursor:
                break
            assert look.gone == set()
        assert (seen, look.gone) == (names, known - names)
        assert 1 < looks <= 5
    assert Rounds(queue, 1000).look({"batch_x"}).gone == {"batch_x"}


def test_the_batches_of_a_dead_driver_do_not_wait_for_their_turn(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(redis_client)
    ticker = Ticker(queue)
    names = [f"batch_{number}" for number in range(600)]
    make_idle(queue, names)
    redis_client.set(keys.driver("one"), 1, ex=5)
    while len(ticker._records) < len(names):
        ticker.tick()
    redis_client.delete(keys.driver("one"))
    monkeypatch.setattr("jobs.control.ticker.GONE_SECONDS", 0.0)
    monkeypatch.setattr("jobs.control.ticker.MOMENT_SECONDS", 60.0)
    for _ in range(3):
        ticker.tick()
    assert {queue.batch_fields(name).driver for name in names} == {""}
