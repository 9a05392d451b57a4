"""How many live calls there may be at once, and how large ones: counted from their submission to
their end, whichever that is.
"""

from collections.abc import Callable, Iterator

import pytest
import redis

from jobs.protocol.requests import Claim, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.limits import ModelOverloaded, TooManyCalls
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.integrity import faults
from tests.support.requests import MODEL, finished, held, pass_time, request

CALLS = 3
GREEDY, OTHER = "live_greedy------", "live_other-------"
DEAD_LETTER = ApiError(500, "It ended the engine.", "server_error", code="engine_crashed").result("req_1")


@pytest.fixture
def small(redis_client: redis.Redis) -> Queue:
    """A queue of three calls for a tenant, and five for a model."""
    return Queue(redis_client, QueueSettings(live_calls_per_tenant=CALLS, live_calls_per_model=5, worker_deaths=2))


@pytest.fixture(autouse=True)
def _sound(redis_client: redis.Redis) -> Iterator[None]:
    yield
    assert faults(redis_client) == []


def register(queue: Queue, worker: str = "w1") -> None:
    queue.register_worker(WorkerRecord(worker, [MODEL], "ready", 100, 1.0, "host", 1))


def fill(queue: Queue) -> list[str]:
    names = [f"{GREEDY}{number}" for number in range(CALLS)]
    for name in names:
        queue.submit(name, request(reply_to="api1"))
    return names


def is_full(queue: Queue) -> bool:
    try:
        queue.submit(f"{GREEDY}more", request())
    except TooManyCalls:
        return True
    queue.cancel([RequestKey(f"{GREEDY}more", 0)])
    return False


def test_a_submission_says_how_many_the_tenant_has(small: Queue) -> None:
    assert [small.submit(f"{GREEDY}{number}", request()) for number in (0, 1, 1)] == [1, 2, 0]
    assert small.submit(f"{OTHER}0", request()) == 1


def test_a_tenant_has_no_more_than_it_may(small: Queue, redis_client: redis.Redis) -> None:
    fill(small)
    before = sorted(redis_client.keys())
    with pytest.raises(TooManyCalls) as caught:
        small.submit(f"{GREEDY}more", request())
    assert not isinstance(caught.value, ModelOverloaded)
    assert sorted(redis_client.keys()) == before
    small.submit(f"{OTHER}0", request())


def test_a_model_has_no_more_than_it_may(small: Queue) -> None:
    fill(small)
    for number in range(2):
        small.submit(f"{OTHER}{number}", request())
    with pytest.raises(ModelOverloaded):
        small.submit(f"{OTHER}2", request())
    small.submit(f"{OTHER}3", request("another model"))


def test_bytes_are_limited_but_for_a_single_call(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client, QueueSettings(live_bytes_per_tenant=1000, live_bytes_per_model=2600))
    queue.submit(f"{GREEDY}0", request(body=b"x" * 2000))
    with pytest.raises(TooManyCalls):
        queue.submit(f"{GREEDY}1", request(body=b"x"))
    queue.submit(f"{OTHER}0", request(body=b"x" * 300))
    with pytest.raises(ModelOverloaded):
        queue.submit(f"{OTHER}1", request(body=b"x" * 300))


def test_a_repeated_submission_is_neither_refused_nor_counted_again(small: Queue) -> None:
    for name in fill(small) * 2:
        small.submit(name, request(reply_to="api1"))
    for name in fill(small)[:1]:
        small.cancel([RequestKey(name, 0)])
    assert not is_full(small)


def commit(queue: Queue, claims: list[Claim]) -> None:
    queue.commit("w1", [finished(claim) for claim in claims])


def cancel(queue: Queue, claims: list[Claim]) -> None:
    queue.cancel([claim.key for claim in claims])


def crash_alone(queue: Queue, claims: list[Claim]) -> None:
    """In a group, then one by one."""
    queue.quarantine("w1", held(claims), DEAD_LETTER)
    for seq in range(2, 3 + CALLS):
        queue.quarantine("w1", held(queue.claim("w1", seq, 9, models=[MODEL])), DEAD_LETTER)
    for seq in range(9, 9 + CALLS):
        queue.quarantine("w1", held(queue.claim("w1", seq, 9, models=[MODEL])), DEAD_LETTER)


def lose_workers(queue: Queue, claims: list[Claim]) -> None:
    queue.reap("w1")
    assert len(queue.claim("w2", 1, 9, models=[MODEL])) == CALLS
    queue.reap("w2")


def outlive_api(queue: Queue, claims: list[Claim]) -> None:
    queue.redis.delete(keys.api_alive("api1"))
    queue.reap()
    pass_time(queue.redis, 60)
    queue.reap()


@pytest.mark.parametrize("end", [commit, cancel, crash_alone, lose_workers, outlive_api])
def test_what_ended_leaves_room(small: Queue, end: Callable[[Queue, list[Claim]], None]) -> None:
    register(small)
    fill(small)
    claims = small.claim("w1", 1, 9, models=[MODEL])
    assert len(claims) == CALLS
    assert is_full(small)
    end(small, claims)
    assert not is_full(small)


@pytest.mark.parametrize("put_back", [Queue.requeue, lambda queue, worker, _held: queue.reap(worker)])
def test_what_waits_again_counts_as_before(small: Queue, put_back: Callable[..., object]) -> None:
    register(small)
    fill(small)
    put_back(small, "w1", held(small.claim("w1", 1, 9, models=[MODEL])))
    assert is_full(small)
    small.cancel([RequestKey(name, 0) for name in fill(small)])
    assert not is_full(small)


def answer_all(queue: Queue, names: list[str], seq: int, size: int) -> None:
    for name in names:
        queue.submit(name, request())
    claims = queue.claim("w1", seq, 9, models=[MODEL])
    assert [claim.key.batch for claim in claims] == names
    queue.commit("w1", [finished(claim, "x" * size) for claim in claims])


def pass_a_minute(client: redis.Redis) -> None:
    """For the streams that are kept."""
    for name in client.zrange(keys.RETAINED, 0, -1):  # type: ignore[union-attr]
        client.zincrby(keys.RETAINED, -61_000, name)


def streams(client: redis.Redis) -> list[int]:
    """The numbers of the calls whose streams are here."""
    names = [name.decode() for name in client.scan_iter(keys.tokens("*"))]
    return sorted(int(name.removesuffix("/0").rpartition("live_")[2]) for name in names)


def test_no_stream_goes_before_it_could_be_read(redis_client: redis.Redis) -> None:
    """However many bytes the answers of one commit have."""
    queue = Queue(redis_client, QueueSettings(stream_keep_bytes=150_000))
    answer_all(queue, ["live_1", "live_2", "live_3"], 1, 100_000)
    answer_all(queue, ["live_4"], 2, 100_000)
    assert streams(redis_client) == [1, 2, 3, 4]
    pass_a_minute(redis_client)
    answer_all(queue, ["live_5"], 3, 10_000)
    assert streams(redis_client) == [4, 5]


def test_a_call_that_ends_twice_counts_once(redis_client: redis.Redis) -> None:
    """Its stream was lost, and it was submitted again."""
    queue = Queue(redis_client)
    for seq in (1, 2):
        answer_all(queue, ["live_1"], seq, 100_000)
        counted = redis_client.hget(keys.RETAINED_BYTES, "")
        redis_client.delete(keys.tokens("live_1/0"))
    assert counted is not None
    assert 100_000 < int(counted) < 200_000


def test_a_stream_without_a_size_can_be_removed(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client)
    redis_client.zadd(keys.RETAINED, {"live_lost/0": 0})
    answer_all(queue, ["live_1"], 1, 10)
    assert redis_client.zrange(keys.RETAINED, 0, -1) == [b"live_1/0"]


def test_the_latest_streams_are_kept_up_to_a_size(redis_client: redis.Redis) -> None:
    """Those that were read and removed leave their room to others."""
    queue = Queue(redis_client, QueueSettings(stream_keep_bytes=250_000))

    def answer(name: str, size: int) -> None:
        pass_a_minute(redis_client)
        answer_all(queue, [name], int(name[5:]), size)

    def kept() -> list[int]:
        return streams(redis_client)

    for number in range(1, 5):
        answer(f"live_{number}", 100_000)
    assert kept() == [3, 4]
    queue.forget_streams([RequestKey("live_3", 0)])
    answer("live_5", 100_000)
    assert kept() == [4, 5]
    answer("live_6", 500_000)
    assert kept() == [6]
    queue.forget_streams([RequestKey("live_6", 0)] * 2)
    assert redis_client.hgetall(keys.RETAINED_BYTES) == {b"": b"0"}
    assert redis_client.exists(keys.RETAINED) == 0
    assert 0 < redis_client.ttl(keys.RETAINED_BYTES) <= 300
