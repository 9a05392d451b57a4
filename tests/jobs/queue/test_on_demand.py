"""Models that a server loads when work for them waits."""

import msgspec
import pytest
import redis

from jobs.queue import keys, on_demand
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerRecord, WorkerState
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
    redis_client.hset(keys.ON_DEMAND, "server-2 gone", msgspec.msgpack.encode(OFFER))
    assert list(queue.on_demand()) == ["b"]


def test_of_the_offers_of_several_servers_the_one_to_wait_for_is_shown(queue: Queue, redis_client: redis.Redis) -> None:
    willing = OnDemandModel("server-0")
    for offers in ({"a b": OFFER, "c": OFFER}, {"a b": willing}):
        queue.offer(offers, list(offers))
    assert {name: one.server for name, one in queue.on_demand().items()} == {"a b": "server-0", "c": "server-1"}
    assert faults(redis_client) == []
    queue.withdraw({"a b": willing})
    assert {name: one.server for name, one in queue.on_demand().items()} == {"a b": "server-1", "c": "server-1"}


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
    assert not redis_client.exists(keys.loaders("live"), keys.loaders("lines"), keys.control("server-1"))


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
    assert faults(redis_client) == ["server-1: would load a, which is not registered"]


def serve(queue: Queue, state: WorkerState = "ready") -> None:
    queue.register_worker(WorkerRecord("w1", ["a"], state, 100, 1.0, "host", 1))


def test_no_server_takes_the_bell_of_a_worker(queue: Queue) -> None:
    serve(queue)
    for number in range(20):
        queue.offer({"a": OFFER}, ["a"])
        assert queue.claim("w1", 2 * number + 1, 10, models=["a"]) == []  # it has room, and waits
        start_batch(queue, f"batch-{number}", 1, model="a")
        assert len(queue.claim("w1", 2 * number + 2, 10, models=["a"])) == 1
        assert bells(queue, "w1") == number + 1
    assert bells(queue) == 0


def test_every_server_is_woken_since_one_may_be_gone_or_have_no_room(queue: Queue, redis_client: redis.Redis) -> None:
    servers = [f"server-{number}" for number in range(5)]
    for server in servers:
        queue.offer({"a": OnDemandModel(server)}, ["a"])
    start_batch(queue, "batch", 1, model="a")
    assert [bells(queue, server) for server in servers] == [1] * 5
    assert 0 < redis_client.ttl(keys.ON_DEMAND) <= on_demand.OFFER_SECONDS
    queue.offer({"a": OFFER}, ["a"])
    assert 0 < redis_client.ttl(keys.loaders("a")) <= on_demand.OFFER_SECONDS


@pytest.mark.parametrize("killed", [False, True])
def test_the_end_of_the_last_worker_wakes_servers(queue: Queue, killed: bool) -> None:
    serve(queue)
    queue.offer({"a": OFFER}, ["a"])
    queue.submit("live_1", request("a"))
    assert bells(queue) == 0
    if killed:
        queue.remove_worker("w1")
    else:
        serve(queue, "draining")
    assert bells(queue) == 1
    serve(queue, "stopped")
    assert bells(queue) == 1
