"""Models that a server loads when work for them waits."""

import msgspec
import pytest
import redis

from jobs.queue import keys, on_demand
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from tests.support.integrity import faults
from tests.support.requests import request, start_batch

OFFER = OnDemandModel("server-1", "needs too much", refusal="memory")


def bells(queue: Queue, server: str = "server-1") -> int:
    return len(queue.control_messages(server, FIRST_ID, 0))


def test_an_offer_lasts_until_it_is_withdrawn_or_not_repeated(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.offer({"a": OFFER, "b": OFFER}, [])
    assert {name: (one.server, one.refusal) for name, one in queue.on_demand().items()} == {
        "a": ("server-1", "memory"),
        "b": ("server-1", "memory"),
    }
    assert {name.decode() for name in redis_client.scan_iter() if redis_client.ttl(name) < 0} <= keys.PERMANENT
    queue.withdraw({"a": OFFER})
    assert list(queue.on_demand()) == ["b"]
    # A server that ended without a word, beside one that goes on
    monkeypatch.setattr(on_demand, "OFFER_SECONDS", -1)
    redis_client.hset(keys.ON_DEMAND, "gone", msgspec.msgpack.encode(OFFER))
    assert list(queue.on_demand()) == ["b"]


def test_the_first_work_for_a_model_rings_as_for_an_idle_worker(queue: Queue, redis_client: redis.Redis) -> None:
    queue.offer({"live": OFFER, "lines": OFFER, "loaded": OFFER}, ["live", "lines"])
    queue.submit("live_1", request("loaded"))
    assert bells(queue) == 0
    queue.submit("live_2", request("live"))
    assert bells(queue) == 1
    queue.submit("live_3", request("live"))
    assert bells(queue) == 1
    start_batch(queue, "batch", 2, model="lines")
    assert bells(queue) == 2
    queue.withdraw({"live": OFFER, "lines": OFFER, "loaded": OFFER})
    assert not redis_client.exists(keys.waiting("live"), keys.waiting("lines"), keys.control("server-1"))


def test_work_waits_until_it_is_claimed_and_is_held_until_it_ends(queue: Queue) -> None:
    queue.submit("live_1", request("a"))
    start_batch(queue, "batch", 3, model="b")
    waiting = queue.waiting_work(["a", "b", "c"])
    assert {name: (live > 0, others > 0) for name, (live, others) in waiting.items()} == {
        "a": (True, False),
        "b": (False, True),
        "c": (False, False),
    }
    assert len(queue.claim("w1", 1, 10, models=["a", "b"])) == 4
    assert queue.waiting_work(["a", "b"]) == {"a": (0, 0), "b": (0, 0)}
    assert queue.held_by(["w1", "w2"]) == {"w1": 4, "w2": 0}


def test_a_server_that_waits_for_work_is_known(queue: Queue, redis_client: redis.Redis) -> None:
    queue.offer({"a": OFFER}, ["a"])
    assert faults(redis_client) == []
    redis_client.delete(keys.ON_DEMAND)
    assert faults(redis_client) == ["server-1: waits for a, which is not registered"]
