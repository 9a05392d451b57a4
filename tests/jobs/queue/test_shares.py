"""Weights of tenants, priorities and deadlines of batches: whose lines a claim takes."""

from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from jobs.protocol.requests import mark_of, new_live_id
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Finished, Queue
from tests.support.dump import Dump
from tests.support.integrity import faults
from tests.support.requests import MODEL, ready_length, request

LINES = 2000


@pytest.fixture(autouse=True)
def _sound(redis_client: redis.Redis) -> Iterator[None]:
    yield
    assert faults(redis_client) == []


def start(
    queue: Queue, batch: str, *, tenant: str = "", priority: int = 0, expires: float = 2e9, lines: int = LINES
) -> None:
    """A batch in progress whose lines all wait."""
    fields = {"priority": priority, "timestamps": {"expires": expires}}
    assert queue.create_batch(batch, lines, tenant=tenant, state="in_progress", fields=fields)
    feed(queue, batch, 0, lines)


def feed(queue: Queue, batch: str, first: int, end: int) -> None:
    for begin in range(first, end, 500):
        rows = [(line, request()) for line in range(begin, min(end, begin + 500))]
        assert queue.ingest(batch, rows, begin, begin + len(rows))


class Claims:
    """A worker that ends at once what it claims, each line with `tokens` of its batch."""

    def __init__(self, queue: Queue, tokens: dict[str, int] | None = None) -> None:
        self.queue, self.tokens = queue, tokens or {}
        self.seq = 0

    def take(self, limit: int) -> list[str]:
        """The batches of the lines of one claim."""
        self.seq += 1
        claims = self.queue.claim("w1", self.seq, limit, models=[MODEL])
        usages = [Usage(0, self.tokens.get(claim.key.batch, 300)) for claim in claims]
        ends = zip(claims, usages, strict=True)
        self.queue.commit(
            "w1", [Finished(claim.key, claim.fence, Result(200, b"{}", usage, "req_1")) for claim, usage in ends]
        )
        return [claim.key.batch for claim in claims]

    def count(self, claims: int, limit: int = 16) -> Counter[str]:
        return Counter(batch for _ in range(claims) for batch in self.take(limit))


class TestWeights:
    def test_tenants_share_tokens_by_weight(self, queue: Queue) -> None:
        """Whatever their lines cost, and however many batches they have."""
        queue.set_weights({"heavy": 2.0})
        tokens = {"batch_heavy": 900, "batch_1": 300, "batch_2": 300}
        for batch in tokens:
            start(queue, batch, tenant="heavy" if batch == "batch_heavy" else "light")
        claims = Claims(queue, tokens)
        claims.count(10)
        taken = claims.count(120)
        service = {batch: taken[batch] * cost for batch, cost in tokens.items()}
        assert service["batch_heavy"] / (service["batch_1"] + service["batch_2"]) == pytest.approx(2, rel=0.1)

    def test_the_same_claims_give_the_same_turns(self, queue: Queue, redis_client: redis.Redis) -> None:
        orders = []
        for _ in range(2):
            redis_client.flushall()
            queue.set_weights({"a": 3.0, "b": 0.7})
            for tenant in ("a", "b", "c"):
                start(queue, f"batch_{tenant}", tenant=tenant, lines=500)
            claims = Claims(queue)
            orders.append([claims.take(5) for _ in range(100)])
        assert orders[0] == orders[1]

    def test_a_tenant_without_contention_gets_all(self, queue: Queue) -> None:
        queue.set_weights({"light": 0.01})
        start(queue, "batch_a", tenant="light")
        assert Claims(queue).count(20) == {"batch_a": 320}

    def test_a_new_weight_counts_from_then_on(self, queue: Queue) -> None:
        for tenant in ("a", "b"):
            start(queue, f"batch_{tenant}", tenant=tenant)
        claims = Claims(queue)
        claims.count(20)
        queue.set_weights({"a": 3.0})
        taken = claims.count(60)
        assert taken["batch_a"] / taken["batch_b"] == pytest.approx(3, rel=0.1)
        queue.set_weights({})
        taken = claims.count(60)
        assert taken["batch_a"] / taken["batch_b"] == pytest.approx(1, rel=0.1)

    def test_live_calls_take_turns_by_weight(self, queue: Queue) -> None:
        queue.register_worker(WorkerRecord("w1", [MODEL], "ready", 100, 1.0, "host", 1))
        queue.set_weights({"heavy": 2.0})
        calls = [new_live_id(tenant) for tenant in ("heavy", "light") for _ in range(60)]
        for call in calls:
            queue.submit(call, request())
        taken = queue.claim("w1", 1, 60, models=[MODEL])
        assert 38 <= sum(mark_of("heavy") in claim.key.batch for claim in taken) <= 42

    def test_only_what_differs_is_stored(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.set_weights({"a": 2.0, "b": 1.0, "c": 0.25})
        assert redis_client.hgetall(keys.WEIGHTS) == {b"a": b"2", b"c": b"0.25"}
        assert redis_client.hlen(keys.LIVE_WEIGHTS) == 2
        queue.set_weights({"c": 0.5})
        assert redis_client.hgetall(keys.WEIGHTS) == {b"c": b"0.5"}
        queue.set_weights({})
        assert redis_client.exists(keys.WEIGHTS, keys.LIVE_WEIGHTS) == 0


class TestPriorities:
    def test_a_lower_one_goes_first(self, queue: Queue) -> None:
        for number, priority in enumerate((0, 100, -100, 7, -3)):
            start(queue, f"batch_{number}", priority=priority, lines=40)
        order = [batch for _ in range(10) for batch in Claims(queue).take(200)]
        assert list(dict.fromkeys(order)) == ["batch_2", "batch_4", "batch_0", "batch_3", "batch_1"]
        assert Counter(order) == Counter({f"batch_{number}": 40 for number in range(5)})

    @pytest.mark.parametrize("priority", [0, -5, 5])
    def test_equal_ones_share(self, queue: Queue, priority: int) -> None:
        tokens = {"batch_a": 300, "batch_b": 900}
        for batch in tokens:
            start(queue, batch, priority=priority)
        claims = Claims(queue, tokens)
        claims.count(10)
        taken = claims.count(100)
        assert taken["batch_a"] / taken["batch_b"] == pytest.approx(3, rel=0.15)

    def test_it_gives_a_tenant_no_more_than_its_share(self, queue: Queue) -> None:
        start(queue, "batch_a", tenant="a", priority=-100)
        start(queue, "batch_b", tenant="b", priority=100)
        taken = Claims(queue).count(50)
        assert abs(taken["batch_a"] - taken["batch_b"]) <= 32

    def test_a_batch_whose_list_is_empty_holds_up_no_other(self, queue: Queue) -> None:
        """And goes first again once it has lines."""
        assert queue.create_batch("batch_first", 100, state="in_progress", fields={"priority": -1})
        start(queue, "batch_other")
        claims = Claims(queue)
        for first in range(0, 50, 10):
            feed(queue, "batch_first", first, first + 10)
            assert claims.take(20) == ["batch_first"] * 10 + ["batch_other"] * 10
            assert claims.take(20) == ["batch_other"] * 20

    def test_one_that_waits_for_its_drain_holds_up_no_other(self, queue: Queue, redis_client: redis.Redis) -> None:
        start(queue, "batch_first", priority=-1, lines=40)
        start(queue, "batch_other")
        claims = Claims(queue)
        assert claims.take(1) == ["batch_first"]
        redis_client.hincrby(keys.batch("batch_first"), "result_bytes", 1 << 40)
        assert claims.take(16) == ["batch_other"] * 16
        redis_client.hincrby(keys.batch("batch_first"), "result_bytes", -(1 << 40))
        assert queue.drained("batch_first", "part-0", [0])
        assert claims.take(16) == ["batch_first"] * 16

    def test_those_that_come_and_go_keep_the_service_that_they_received(self, queue: Queue) -> None:
        """One batch's lines come in portions that one claim takes whole, the other's never end."""
        start(queue, "batch_steady", priority=9)
        assert queue.create_batch("batch_portions", LINES, state="in_progress", fields={"priority": 9})
        claims, fed, taken = Claims(queue, {"batch_portions": 1200}), 0, Counter[str]()
        for seq in range(200):
            if ready_length(queue, "batch_portions") < 2:
                feed(queue, "batch_portions", fed, fed + 4)
                fed += 4
            taken.update(claims.take(8) if seq >= 20 else ())
            if seq < 20:
                claims.take(8)
        assert taken["batch_steady"] / taken["batch_portions"] == pytest.approx(4, rel=0.5)


class TestRisks:
    def test_urgent_ones_go_before_all_others_of_their_tenant(self, queue: Queue, redis_client: redis.Redis) -> None:
        start(queue, "batch_first", priority=-100, lines=500)
        for batch, expires in (("batch_late", 1.9e9), ("batch_soon", 1.8e9)):
            start(queue, batch, priority=50, expires=expires, lines=16)
        start(queue, "batch_other", tenant="other", lines=500)
        queue.note_risks({"batch_late": "urgent", "batch_soon": "urgent"})
        order = [batch for batch in (Claims(queue).take(96)) if batch != "batch_other"]
        assert list(dict.fromkeys(order)) == ["batch_soon", "batch_late", "batch_first"]
        assert len(order) == 48, "no more than the tenant's share"

    @pytest.mark.parametrize("risk", ["", "late"])
    def test_they_return_to_their_places(self, queue: Queue, risk: str) -> None:
        """Level with those that were served least, so that neither gets ahead."""
        for batch in ("batch_a", "batch_b", "batch_c"):
            start(queue, batch)
        claims = Claims(queue)
        claims.count(9)
        queue.note_risks({"batch_a": "urgent"})
        assert claims.count(10) == {"batch_a": 160}
        queue.note_risks({"batch_a": risk})
        taken = claims.count(60)
        assert all(abs(taken[batch] - 320) <= 32 for batch in ("batch_a", "batch_b", "batch_c")), taken

    def test_a_batch_that_gets_lines_later_is_urgent_still(self, queue: Queue) -> None:
        assert queue.create_batch(
            "batch_a", 20, state="in_progress", fields={"priority": 5, "timestamps": {"expires": 1.8e9}}
        )
        start(queue, "batch_b")
        queue.note_risks({"batch_a": "urgent"})
        claims = Claims(queue)
        for first in (0, 10):
            feed(queue, "batch_a", first, first + 10)
            assert claims.take(20) == ["batch_a"] * 10 + ["batch_b"] * 10

    def test_one_that_does_not_run_is_left_alone(self, queue: Queue, redis_client: redis.Redis) -> None:
        start(queue, "batch_a", lines=10)
        assert queue.transition("batch_a", ["in_progress"], "cancelling")
        before = Dump(redis_client).values
        queue.note_risks({"batch_a": "urgent", "batch_unknown": "urgent"})
        assert Dump(redis_client).values == before

    def test_those_at_risk_are_counted(self, queue: Queue, redis_client: redis.Redis) -> None:
        for batch, risk in {"batch_a": "urgent", "batch_b": "late", "batch_c": "urgent", "batch_d": ""}.items():
            start(queue, batch, lines=1)
            redis_client.sadd(keys.ACTIVE, batch)
            queue.note_risks({batch: risk})
        assert queue.depths([MODEL]).at_risk == {"urgent": 2, "late": 1}
        queue.transition("batch_a", ["in_progress"], "finalizing")
        assert queue.depths([MODEL]).at_risk == {"urgent": 1, "late": 1}
