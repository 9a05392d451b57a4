"""Requests per minute of a key: never more than its bucket gives, whichever process counts."""

import threading
import time

import pytest
import redis

from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.redis_server import running_server


def age(client: redis.Redis, key_id: str, seconds: float) -> None:
    """Brings the time at which the bucket is full nearer, as if so much time had passed."""
    name = keys.rate(key_id)
    stored = client.get(name)
    assert isinstance(stored, bytes)
    micros, token = stored.split(b" ")
    client.set(name, b"%d %b" % (int(micros) - int(1e6 * seconds), token), keepttl=True)


def test_a_bucket_empties_and_fills_evenly(queue: Queue, redis_client: redis.Redis) -> None:
    answers = [queue.admit("k", 3) for _ in range(4)]
    assert [(answer.admitted, answer.left) for answer in answers] == [(True, 2), (True, 1), (True, 0), (False, 0)]
    assert 10 < answers[3].wait_seconds <= 20
    assert 50 < answers[3].full_seconds <= 60
    assert answers[0].wait_seconds == 0
    age(redis_client, "k", 20)
    assert [queue.admit("k", 3).admitted for _ in range(2)] == [True, False]
    age(redis_client, "k", 60)
    assert [queue.admit("k", 3).admitted for _ in range(4)] == [True] * 3 + [False]


def test_keys_have_buckets_of_their_own_that_go_when_full(queue: Queue, redis_client: redis.Redis) -> None:
    assert [queue.admit(key, 1).admitted for key in ("a", "b", "a")] == [True, True, False]
    assert 50_000 < redis_client.pttl(keys.rate("a")) <= 60_000  # type: ignore[operator]


def test_a_limit_may_change_at_any_time(queue: Queue) -> None:
    assert not [queue.admit("k", 2).admitted for _ in range(3)][2]
    assert queue.admit("k", 6000).wait_seconds < 0.02
    assert queue.admit("k", 1).wait_seconds > 50


def test_a_clock_that_went_back_blocks_no_key_for_more_than_a_minute(queue: Queue, redis_client: redis.Redis) -> None:
    queue.admit("k", 2)
    age(redis_client, "k", -10_000)
    assert queue.admit("k", 2).wait_seconds <= 30


@pytest.mark.parametrize("per_minute", [1, 7, 600])
def test_many_processes_let_in_no_more_than_one_would(
    redis_url: str, redis_client: redis.Redis, per_minute: int
) -> None:
    clients = [connect(redis_url) for _ in range(4)]
    admitted: list[bool] = []

    def knock(queue: Queue) -> None:
        admitted.extend(queue.admit("k", per_minute).admitted for _ in range(200))

    began = time.monotonic()
    threads = [threading.Thread(target=knock, args=(Queue(client),)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = per_minute * (1 + (time.monotonic() - began) / 60)
    assert min(per_minute, 800) <= sum(admitted) <= allowed
    for client in clients:
        client.close()


def test_a_full_server_still_counts() -> None:
    with running_server() as server, connect(server.url) as client:
        queue = Queue(client)
        client.config_set("maxmemory", "1")
        assert [queue.admit("k", 1).admitted for _ in range(2)] == [True, False]
