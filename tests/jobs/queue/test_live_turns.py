"""Which live call comes next, and which come no more."""

from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from jobs.protocol.requests import RequestKey, mark_of, new_live_id
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import CLAIM_BYTES, Queue
from jobs.queue.scripts import MAX_ITEMS
from tests.support.integrity import faults
from tests.support.requests import MODEL, finished, held, request, start_batch

A, B, C = (f"live_{letter * 12}" for letter in "abc")


@pytest.fixture(autouse=True)
def _served(queue: Queue, redis_client: redis.Redis) -> Iterator[None]:
    """A worker serves the model."""
    register(queue, "w1")
    yield
    assert faults(redis_client) == []


def register(queue: Queue, worker: str) -> None:
    queue.register_worker(WorkerRecord(worker, [MODEL], "ready", 100, 1.0, "host", 1))


def submit(queue: Queue, tenant: str, count: int, first: int = 0, api: str | None = None, size: int = 10) -> list[str]:
    names = [f"{tenant}{number:04}" for number in range(first, first + count)]
    for name in names:
        queue.submit(name, request(body=b"x" * size, reply_to=api))
    return names


def claimed(queue: Queue, seq: int, limit: int, worker: str = "w1") -> list[str]:
    return [claim.key.batch for claim in queue.claim(worker, seq, limit, models=[MODEL])]


class TestTurns:
    def test_one_call_is_not_behind_a_thousand_of_another_tenant(self, queue: Queue) -> None:
        submit(queue, A, 1000)
        first = claimed(queue, 1, 10)
        submit(queue, B, 1)
        assert first == [f"{A}{number:04}" for number in range(10)]
        assert f"{B}0000" in claimed(queue, 2, 2)

    def test_tenants_take_turns_and_each_has_its_order(self, queue: Queue) -> None:
        names = {tenant: submit(queue, tenant, 6) for tenant in (A, B, C)}
        order = claimed(queue, 1, 18)
        for tenant, of_tenant in names.items():
            assert [name for name in order if name.startswith(tenant)] == of_tenant
        for first in range(0, 18, 3):
            assert {name[:17] for name in order[first : first + 3]} == {A, B, C}

    def test_large_calls_count_for_more(self, queue: Queue) -> None:
        submit(queue, A, 10, size=9 * 4 * 256)
        submit(queue, B, 100)
        order = claimed(queue, 1, 50)
        assert 4 <= sum(name.startswith(A) for name in order) <= 6

    def test_a_tenant_that_had_nothing_for_long_has_no_credit(self, queue: Queue) -> None:
        submit(queue, A, 100)
        submit(queue, B, 1)
        claimed(queue, 1, 80)
        submit(queue, B, 20)
        assert sum(name.startswith(B) for name in claimed(queue, 2, 10)) == 5

    def test_cancelled_calls_are_not_charged(self, queue: Queue) -> None:
        submit(queue, B, 50)
        queue.cancel([RequestKey(name, 0) for name in submit(queue, A, 50)])
        claimed(queue, 1, 10)
        submit(queue, A, 1)
        assert f"{A}0000" in claimed(queue, 2, 2)

    def test_what_was_requeued_comes_first(self, queue: Queue) -> None:
        submit(queue, A, 3)
        submit(queue, B, 3)
        claims = queue.claim("w1", 1, 4, models=[MODEL])
        queue.requeue("w1", held(claims))
        submit(queue, C, 3)
        assert claimed(queue, 2, 4) == [claim.key.batch for claim in claims]

    def test_what_waits_is_in_the_gauges(self, queue: Queue) -> None:
        submit(queue, A, 3)
        submit(queue, B, 2)
        queue.requeue("w1", held(queue.claim("w1", 1, 1, models=[MODEL])))
        assert queue.depths([MODEL]).live == {MODEL: 5}

    def test_batches_keep_their_share(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 100)
        for number in range(50):
            submit(queue, f"live_{number:012}", 4)
        assert sum(name == "batch_a" for name in claimed(queue, 1, 100)) == 10

    @pytest.mark.parametrize(("limit", "live_limit"), [(8, 8), (16, 32), pytest.param(16, 64, marks=pytest.mark.proof)])
    def test_batches_keep_their_share_beside_large_calls(self, queue: Queue, limit: int, live_limit: int) -> None:
        """Which fill every claim up to its bytes."""
        start_batch(queue, "batch_a", 100)
        submit(queue, A, 12, size=CLAIM_BYTES // 4)
        given: Counter[bool] = Counter()  # by whether it is a live call
        for seq in range(1, 11):
            claims = queue.claim("w1", seq, limit, models=[MODEL], live_limit=live_limit)
            queue.commit("w1", [finished(claim) for claim in claims])
            given.update(claim.key.live for claim in claims)
            submit(queue, A, 4, first=8 + 4 * seq, size=CLAIM_BYTES // 4)
        assert given[True] == 40
        assert given[False] in (4, 5)

    def test_outlast_the_only_worker(self, queue: Queue) -> None:
        """Also what was submitted while no worker served the model."""
        submit(queue, A, 100)
        queue.remove_worker("w1")
        submit(queue, A, 100, first=100)
        submit(queue, B, 1)
        register(queue, "w2")
        submit(queue, C, 1)
        order = claimed(queue, 1, 10, "w2")
        assert {f"{B}0000", f"{C}0000"} <= set(order[:4])
        assert [name for name in order if name.startswith(A)] == [f"{A}{number:04}" for number in range(8)]


class TestCallsBeyondTheLimits:
    def beyond(self, queue: Queue, seq: int, served: list[str], most: int = 9, live_limit: int = 0) -> list[str]:
        claims = queue.claim("w1", seq, 0, models=[MODEL], live_limit=live_limit, beyond=most, served=served)
        return [claim.key.batch for claim in claims]

    def test_are_one_of_each_tenant_that_has_less_than_its_share(self, queue: Queue) -> None:
        for tenant in (A, B, C):
            submit(queue, tenant, 3)
        a, b, c = (tenant.removeprefix("live_") for tenant in (A, B, C))
        assert sorted(self.beyond(queue, 1, [a])) == [f"{B}0000", f"{C}0000"]
        assert self.beyond(queue, 2, [a, b]) == [f"{C}0001"]
        assert self.beyond(queue, 3, [a, b, c]) == []
        assert len(self.beyond(queue, 4, [], most=2)) == 2

    def test_come_once_the_limit_is_reached(self, queue: Queue) -> None:
        submit(queue, A, 30)
        claimed(queue, 1, 8)
        submit(queue, B, 30)
        claimed(queue, 2, 20)
        submit(queue, C, 1)
        a, b = (tenant.removeprefix("live_") for tenant in (A, B))
        assert f"{C}0000" in self.beyond(queue, 3, [a, b], live_limit=1)

    def test_have_the_weight_of_their_tenant(self, queue: Queue) -> None:
        queue.set_weights({"x": 2.5})
        queue.submit(new_live_id("x"), request())
        queue.submit(new_live_id("y"), request())
        weights = {claim.key.tenant_mark: claim.weight for claim in queue.claim("w1", 1, 5, models=[MODEL])}
        assert weights == {mark_of("x"): 2.5, mark_of("y"): 1.0}


class TestCallsWithoutAClient:
    def test_of_a_dead_api_are_not_given_to_a_worker(self, queue: Queue, redis_client: redis.Redis) -> None:
        submit(queue, A, 3, api="dead")
        submit(queue, A, 2, first=3, api="alive")
        redis_client.delete(keys.api_alive("dead"))
        assert claimed(queue, 1, 9) == [f"{A}0003", f"{A}0004"]
        assert redis_client.keys(f"*{A}0000*") == []

    def test_are_dropped_some_at_a_time(self, queue: Queue, redis_client: redis.Redis) -> None:
        """The worker learns at once that there may be more."""
        submit(queue, A, 2 * MAX_ITEMS + 10, api="dead")
        submit(queue, A, 1, first=9000, api="alive")
        redis_client.delete(keys.api_alive("dead"))
        assert [claimed(queue, seq, 9) for seq in (1, 2)] == [[], []]
        assert redis_client.llen(keys.live_of(MODEL, A.removeprefix("live_"))) == 11
        assert [order.kind for order in queue.control_messages("w1", "0-0", 0)][-2:] == ["bell", "bell"]
        assert claimed(queue, 3, 9) == [f"{A}9000"]

    def test_are_not_charged(self, queue: Queue, redis_client: redis.Redis) -> None:
        submit(queue, A, 50, api="dead")
        submit(queue, B, 50)
        redis_client.delete(keys.api_alive("dead"))
        claimed(queue, 1, 10)
        submit(queue, A, 1, first=50)
        assert f"{A}0050" in claimed(queue, 2, 2)

    def test_end_wherever_they_are(self, queue: Queue, redis_client: redis.Redis) -> None:
        submit(queue, A, 2, api="dead")
        running = queue.claim("w1", 1, 1, models=[MODEL])
        submit(queue, B, 1)
        redis_client.delete(keys.api_alive("dead"))
        queue.reap()
        assert redis_client.exists(keys.bodies(f"{A}0000"), keys.bodies(f"{A}0001")) == 2  # Redis may have been away
        redis_client.hset(keys.TICK, "reap_after", 0)
        queue.reap()
        assert redis_client.keys(f"*{A}*:*") == []
        orders = queue.control_messages("w1", "0-0", 0)
        assert [order.keys for order in orders if order.kind == "cancel"] == [[running[0].key]]
        assert queue.renew("w1", held(running)) == [running[0].key]
        assert claimed(queue, 2, 9) == [f"{B}0000"]

    def test_do_not_include_those_that_a_client_reads_elsewhere(self, queue: Queue, redis_client: redis.Redis) -> None:
        submit(queue, A, 2, api="dead")
        queue.watch(RequestKey(f"{A}0001", 0), 60)
        redis_client.delete(keys.api_alive("dead"))
        queue.reap()
        redis_client.hset(keys.TICK, "reap_after", 0)
        queue.reap()
        assert claimed(queue, 1, 9) == [f"{A}0001"]

    def test_do_not_include_those_that_no_api_waits_for(self, queue: Queue, redis_client: redis.Redis) -> None:
        submit(queue, A, 1)
        queue.reap()
        redis_client.hset(keys.TICK, "reap_after", 0)
        queue.reap()
        assert claimed(queue, 1, 9) == [f"{A}0000"]


class TestBytesOfAClaim:
    SIZE = CLAIM_BYTES // 4

    def test_of_live_calls(self, queue: Queue) -> None:
        names = submit(queue, A, 10, size=self.SIZE)
        last_id = "0-0"
        for seq, some in enumerate((names[:4], names[4:8], names[8:]), 1):
            assert claimed(queue, seq, 10) == some
            orders = queue.control_messages("w1", last_id, 0)
            last_id = orders[-1].id if orders else last_id
            # There may be more, which the worker learns at once
            assert ("bell" in [order.kind for order in orders]) == (seq < 3)

    def test_of_a_batch(self, queue: Queue) -> None:
        assert queue.create_batch("batch_a", 10, state="in_progress")
        for line in range(10):
            assert queue.ingest("batch_a", [(line, request(body=b"x" * self.SIZE))], line, line + 1)
        lines = [[claim.key.line for claim in queue.claim("w1", seq, 10, models=[MODEL])] for seq in (1, 2, 3)]
        assert lines == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    def test_one_request_is_always_given(self, queue: Queue) -> None:
        names = submit(queue, A, 2, size=CLAIM_BYTES + 1)
        assert [claimed(queue, seq, 10) for seq in (1, 2)] == [names[:1], names[1:]]
