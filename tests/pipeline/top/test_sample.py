"""What `pipeline top` reads of a fleet, and the rates that follow."""

import pytest
import redis

from jobs.queue import keys
from jobs.queue.request_queue import Queue
from pipeline.top.rates import Rates
from pipeline.top.sample import Sample, take_sample
from tests.support.requests import MODEL, finished, start_batch


def end(queue: Queue, batch: str, state: str = "completed") -> None:
    """A batch that ended and was cleaned."""
    queue.create_batch(batch, 3, state=state)
    queue.clean(batch, queue.batch_fields(batch))


def at(sample: Sample, taken: float) -> Sample:
    """The same, taken at another time."""
    return sample._replace(taken=taken)


def start(queue: Queue, batch: str, lines: int) -> None:
    start_batch(queue, batch, lines)
    queue.announce("", batch, listed=False, runs=True)


def answer(queue: Queue, seq: int, lines: int) -> None:
    queue.commit("w", [finished(claim) for claim in queue.claim("w", seq, lines, models=[MODEL])])


def test_batches_at_work_come_first_then_those_that_ended_last(queue: Queue, redis_client: redis.Redis) -> None:
    for place, batch in enumerate(("batch_1", "batch_2", "batch_3")):
        end(queue, batch)
        redis_client.zadd(keys.ENDED, {batch: place})
    queue.create_batch("batch_4", 0)
    queue.announce("", "batch_4", listed=False, runs=True)
    start(queue, "batch_6", 2)
    start(queue, "batch_5", 2)
    queue.create_batch("batch_7", 1, state="expired")  # it has ended, and is not cleaned yet
    queue.announce("", "batch_7", listed=False, runs=True)
    queue.announce("", "batch_8", listed=False, runs=True)  # its process was killed before it made the record
    found = take_sample(queue).batches
    assert [batch.id for batch in found] == [f"batch_{number}" for number in (5, 6, 4, 7, 3, 2, 1)]
    assert [batch.ended_ago is None for batch in found] == [True] * 3 + [False] * 4


def test_a_batch_that_was_begun_again_is_at_work_once(queue: Queue) -> None:
    end(queue, "batch_a")
    queue.transition("batch_a", ["completed"], "in_progress")
    assert take_sample(queue).batches == []  # between two steps of what begins it again
    queue.announce("", "batch_a", listed=False, runs=True)
    [found] = take_sample(queue).batches
    assert (found.id, found.ended_ago) == ("batch_a", None)


def test_records_that_are_gone_are_left_out(queue: Queue, redis_client: redis.Redis) -> None:
    end(queue, "batch_a")
    redis_client.delete(keys.batch("batch_a"))  # its days are over
    assert take_sample(queue).batches == []


def test_rates_are_those_between_samples(queue: Queue) -> None:
    start(queue, "batch_a", 20)
    rates = Rates()
    answer(queue, 1, 2)
    rates.add(at(take_sample(queue), 100.0))
    assert (rates.lines_per_second("batch_a"), rates.requests_per_second) == (None, None)
    answer(queue, 2, 6)
    rates.add(at(take_sample(queue), 104.0))
    assert rates.lines_per_second("batch_a") == rates.requests_per_second == pytest.approx(1.5)
    assert rates.seconds_left("batch_a") == pytest.approx(8.0)


def test_an_idle_fleet_ends_no_requests_each_second(queue: Queue) -> None:
    rates = Rates()
    for taken in (1.0, 2.0):
        rates.add(at(take_sample(queue), taken))
    assert rates.requests_per_second == 0.0


def test_no_rate_is_negative_where_redis_lost_what_ended(queue: Queue, redis_client: redis.Redis) -> None:
    start(queue, "batch_a", 20)
    answer(queue, 1, 10)
    rates = Rates()
    rates.add(at(take_sample(queue), 1.0))
    redis_client.hset(keys.batch("batch_a"), "completed", 4)
    redis_client.hset(keys.TOTALS, "ended", 4)
    rates.add(at(take_sample(queue), 2.0))
    assert (rates.lines_per_second("batch_a"), rates.requests_per_second) == (None, None)
    answer(queue, 2, 2)
    rates.add(at(take_sample(queue), 3.0))
    assert rates.lines_per_second("batch_a") == rates.requests_per_second == pytest.approx(2.0)
