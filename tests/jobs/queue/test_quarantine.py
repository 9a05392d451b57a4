"""Requests in flight at an engine crash: they run again in groups, then alone, beside nothing else,
and are dead-lettered only then.
"""

import pytest
import redis

from jobs.protocol.requests import Claim, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.integrity import faults
from tests.support.requests import (
    MODEL,
    delta,
    finished,
    held,
    lines,
    read_api,
    ready_length,
    request,
    start_batch,
    token_ids_in,
)

DEAD_LETTER = ApiError(500, "It ended the engine.", "server_error", code="engine_crashed").result("req_1")


@pytest.fixture(autouse=True)
def _sound(redis_client: redis.Redis):
    yield
    assert faults(redis_client) == []


def take(queue: Queue, worker: str, seq: int, limit: int = 300, models: list[str] | None = None) -> list[Claim]:
    return queue.claim(worker, seq, limit, models=models or [MODEL])


def quarantine(queue: Queue, worker: str, claims: list[Claim]) -> list[RequestKey]:
    return queue.quarantine(worker, held(claims), DEAD_LETTER)


def ready(queue: Queue, worker: str, models: list[str] | None = None) -> None:
    queue.register_worker(WorkerRecord(worker, models or [MODEL], "ready", 100, 1.0, "host", 1))


def orders(queue: Queue, worker: str) -> list[str]:
    return [order.kind for order in queue.control_messages(worker, "0-0", 0)]


def tick(queue: Queue) -> None:
    """What the ticker does once a second, on a server that has been there for long."""
    queue.reap()
    queue.redis.hset(keys.TICK, "reap_after", 0)
    queue.reap()


def wait_in_vain(client: redis.Redis, model: str = MODEL) -> None:
    client.hincrby(keys.QUARANTINE_WAITS, model, -10_001)


def test_one_poison_among_256_is_found_and_all_others_get_through(queue: Queue) -> None:
    """Act as workers do: a core crashes whenever line 77 runs, and what ran with it continues in
    isolation.
    """
    start_batch(queue, "batch_a", 256)
    deaths, seq, worker = 0, 0, "w0"
    while claims := take(queue, worker, (seq := seq + 1)):
        if 77 in lines(claims):
            assert quarantine(queue, worker, claims) == []
            queue.reap(worker)
            deaths, worker = deaths + 1, f"w{deaths + 1}"
        elif claims[0].engine_crashes:
            assert len(claims) <= 16
            assert queue.requeue(worker, held(claims), cleared=True) == []
        else:
            assert queue.commit(worker, [finished(claim) for claim in claims]) == []
        assert seq < 100
    assert deaths == 3
    fields = queue.batch_fields("batch_a")
    assert (fields.completed, fields.failed) == (255, 1)
    assert {line: result.status for line, result in queue.results("batch_a") if not result.succeeded} == {77: 500}


class TestQuarantined:
    def test_groups_of_sixteen_then_alone_then_dead_lettered(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 40)
        assert quarantine(queue, "w1", take(queue, "w1", 1)) == []
        first = take(queue, "w2", 1)
        assert lines(first) == sorted(lines(first), key=str)
        assert sorted(lines(first)) == list(range(16))
        assert {claim.engine_crashes for claim in first} == {1}
        assert {claim.attempt for claim in first} == {2}
        assert len(take(queue, "w3", 1)) == 16
        assert len(take(queue, "w4", 1)) == 8
        quarantine(queue, "w2", first)
        alone = [take(queue, f"w5.{number}", 1) for number in range(17)]
        assert [len(claims) for claims in alone] == [1] * 16 + [0]
        assert {claim.engine_crashes for claims in alone for claim in claims} == {2}
        assert quarantine(queue, "w5.0", alone[0]) == []
        [(line, result)] = queue.results("batch_a")
        assert (line, result) == (alone[0][0].key.line, DEAD_LETTER)
        assert queue.batch_fields("batch_a").failed == 1

    def test_repeated_changes_nothing(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 20)
        claims = take(queue, "w1", 1)
        assert quarantine(queue, "w1", claims) == []
        before = redis_client.zrange(keys.quarantined(MODEL), 0, -1, withscores=True)
        assert quarantine(queue, "w1", claims) == [claim.key for claim in claims]
        assert redis_client.zrange(keys.quarantined(MODEL), 0, -1, withscores=True) == before

    def test_one_whose_tokens_the_server_forgot_is_called_out_too(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        quarantine(queue, "w1", take(queue, "w1", 1))
        [isolated] = take(queue, "w2", 1)
        ready(queue, "idle")
        assert take(queue, "idle", 1) == []
        assert queue.publish("w2", [delta(isolated, 5, [6], "f", 5)]) == [isolated.key]
        assert orders(queue, "idle") == ["bell"]
        assert [claim.engine_crashes for claim in take(queue, "idle", 2)] == [1]

    def test_what_was_lost_or_taken_anew_is_left_alone(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        claims = take(queue, "w1", 1)
        queue.reap("w1")
        [new, _] = take(queue, "w2", 1)
        assert quarantine(queue, "w1", claims) == [claim.key for claim in claims]
        assert queue.renew("w2", held([new])) == []

    def test_a_dead_lettered_live_call_gets_its_answer(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        for number in range(3):
            [claim] = take(queue, f"w{number}", 1)
            queue.publish(f"w{number}", [delta(claim, 0, [], accepted=True), delta(claim, 0, [5], "a")])
            quarantine(queue, f"w{number}", [claim])
        assert take(queue, "w3", 1) == []
        entries = [entry for _, entry in read_api(queue, "api1")]
        assert [(entry.entry_id, token_ids_in(entry)) for entry in entries] == [("0-1", []), ("1-0", [5]), ("1-2", [])]
        assert entries[-1].result == DEAD_LETTER
        assert redis_client.exists(keys.bodies("live_a"), keys.TRIES, keys.QUARANTINE_WAITS) == 0

    def test_the_last_line_ends_the_batch(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        for number in range(3):
            quarantine(queue, f"w{number}", take(queue, f"w{number}", 1))
        fields = queue.batch_fields("batch_a")
        assert (fields.completed, fields.failed, fields.body_bytes) == (0, 1, 0)
        messages = queue.control_messages(keys.JOBS_CONTROL, "0-0", 0)
        # Its list ran empty, and it ended
        assert [message.batch for message in messages] == ["batch_a", "batch_a"]

    def test_hands_the_checkpoint_along(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5, 6], "ab")])
        quarantine(queue, "w1", [claim])
        [again] = take(queue, "w2", 1)
        assert again.checkpoint is not None
        assert again.checkpoint.choices[0].token_ids == [5, 6]

    def test_more_than_one_call_may_hold(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 700)
        claims = take(queue, "w1", 1, 500) + take(queue, "w1", 2, 500)
        assert quarantine(queue, "w1", claims) == []
        assert redis_client.zcard(keys.quarantined(MODEL)) == 700


class TestIsolatedRun:
    def test_before_anything_else_and_beside_nothing(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 3)
        quarantined = take(queue, "w1", 1)
        start_batch(queue, "batch_b", 3)
        queue.submit("live_a", request())
        [busy] = take(queue, "w2", 1, 1)
        quarantine(queue, "w1", quarantined)
        # It holds something
        assert all(claim.engine_crashes == 0 for claim in take(queue, "w2", 2, 1))
        isolated = take(queue, "w3", 1)
        assert sorted(lines(isolated)) == [0, 1, 2]
        assert {claim.key.batch for claim in isolated} == {"batch_a"}
        assert take(queue, "w3", 2) == []
        assert take(queue, "w3", 1) == []  # a late duplicate
        queue.commit("w3", [finished(claim) for claim in isolated[:2]])
        assert take(queue, "w3", 3) == []
        queue.requeue("w3", held(isolated[2:]), cleared=True)
        assert len(take(queue, "w3", 4)) == 3  # what is left of batch_b, and the cleared line
        assert busy.key.live

    def test_the_same_number_gives_the_same_group(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 20)
        quarantine(queue, "w1", take(queue, "w1", 1))
        isolated = take(queue, "w2", 1)
        assert take(queue, "w2", 1) == isolated
        queue.commit("w2", [finished(isolated[0])])
        assert take(queue, "w2", 1) == isolated[1:]

    def test_a_group_larger_than_the_limit_is_tried_in_parts(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 16)
        quarantine(queue, "w1", take(queue, "w1", 1))
        parts = [take(queue, f"w{number}", 1, 6) for number in range(2, 5)]
        assert [len(part) for part in parts] == [6, 6, 4]
        assert sorted(line for part in parts for line in lines(part)) == list(range(16))

    def test_a_full_worker_that_makes_room_for_live_calls_takes_none(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        quarantine(queue, "w1", take(queue, "w1", 1))
        queue.submit("live_a", request())
        [claim] = queue.claim("w2", 1, 0, models=[MODEL], live_limit=4)
        assert claim.live

    def test_of_one_model_at_a_time(self, queue: Queue) -> None:
        for model in "ab":
            start_batch(queue, f"batch_{model}", 2, model=model)
        quarantine(queue, "w1", take(queue, "w1", 1, models=["a", "b"]))
        assert take(queue, "w2", 1, models=["c"]) == []
        groups = [take(queue, worker, 1, models=["a", "b"]) for worker in ("w3", "w4")]
        assert [len(group) for group in groups] == [2, 2]
        assert [len({claim.request.model for claim in group}) for group in groups] == [1, 1]

    def test_a_worker_reaped_meanwhile_gives_the_group_back_as_one(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 20)
        quarantine(queue, "w1", take(queue, "w1", 1))
        isolated = take(queue, "w2", 1)
        assert queue.reap("w2") == 16
        assert len(take(queue, "w3", 1)) == 4
        again = take(queue, "w4", 1)
        assert set(lines(again)) == set(lines(isolated))
        assert {(claim.engine_crashes, claim.attempt) for claim in again} == {(1, 3)}

    def test_requeued_without_a_verdict_they_stay_in_quarantine(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 5)
        quarantine(queue, "w1", take(queue, "w1", 1))
        isolated = take(queue, "w2", 1)
        for _ in range(2):
            queue.requeue("w2", held(isolated))
        assert ready_length(queue, "batch_a") == 0
        again = take(queue, "w3", 1)
        assert {(claim.engine_crashes, claim.attempt) for claim in again} == {(1, 2)}

    def test_released_they_are_like_others(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 20)
        quarantine(queue, "w1", take(queue, "w1", 1, 2))
        isolated = take(queue, "w2", 1)
        for _ in range(2):
            queue.requeue("w2", held(isolated), cleared=True)
        claims = take(queue, "w3", 1)
        assert lines(claims)[:2] == [0, 1]
        assert {claim.engine_crashes for claim in claims} == {0}
        quarantine(queue, "w3", claims)
        assert {claim.engine_crashes for claim in take(queue, "w4", 1)} == {1}

    def test_turns_of_batches_go_on_beside_it(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 10)
        quarantine(queue, "w1", take(queue, "w1", 1))
        assert redis_client.exists(keys.ring(MODEL, ""), keys.tenants(MODEL)) == 0
        start_batch(queue, "batch_b", 4)
        take(queue, "w2", 1)
        assert lines(take(queue, "w3", 1)) == [0, 1, 2, 3]


class TestCancelInQuarantine:
    def test_a_live_call_among_the_quarantined(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request())
        quarantine(queue, "w1", take(queue, "w1", 1))
        queue.submit("live_a", request())  # a late repeat
        for _ in range(2):
            queue.cancel([RequestKey("live_a", 0)])
        assert take(queue, "w2", 1) == []
        assert (
            redis_client.exists(keys.bodies("live_a"), keys.quarantined(MODEL), keys.QUARANTINE_WAITS, keys.TRIES) == 0
        )

    def test_a_batch_with_lines_waiting_tried_and_among_the_quarantined(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        queue.create_batch("batch_a", 60, state="in_progress")
        queue.ingest("batch_a", [(line, request("ab"[line % 2])) for line in range(60)], 0, 60)
        quarantine(queue, "w1", take(queue, "w1", 1, 40, models=["a", "b"]))
        isolated = take(queue, "w2", 1, models=["a"])
        assert queue.transition("batch_a", ["in_progress"], "cancelling")
        for _ in range(2):
            queue.remove_unfinished("batch_a")
        assert queue.renew("w2", held(isolated)) == [claim.key for claim in isolated]
        assert quarantine(queue, "w2", isolated) == [claim.key for claim in isolated]
        assert take(queue, "w3", 1, models=["a", "b"]) == []
        assert (
            redis_client.exists(
                keys.quarantined("a"), keys.quarantined("b"), keys.QUARANTINE_WAITS, keys.TRIES, keys.bodies("batch_a")
            )
            == 0
        )

    def test_a_forgotten_batch_leaves_nothing(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 40)
        quarantine(queue, "w1", take(queue, "w1", 1))
        isolated = take(queue, "w2", 1)
        queue.forget("batch_a")
        queue.requeue("w2", held(isolated), cleared=True)
        for worker in ("w1", "w2"):
            queue.remove_worker(worker)
        assert {name.decode() for name in redis_client.scan_iter() if redis_client.ttl(name) < 0} <= keys.PERMANENT

    def test_the_members_of_an_isolated_group(self, queue: Queue) -> None:
        for number in range(3):
            queue.submit(f"live_{number}", request())
        quarantine(queue, "w1", take(queue, "w1", 1))
        isolated = take(queue, "w2", 1)
        queue.cancel([isolated[0].key])
        queue.submit("live_new", request())
        assert take(queue, "w2", 2) == []
        queue.cancel([claim.key for claim in isolated[1:]])
        assert [claim.key.batch for claim in take(queue, "w2", 3)] == ["live_new"]


class TestWakingAndOrders:
    def test_idle_workers_are_woken_for_each_group(self, queue: Queue) -> None:
        for worker in ("idle1", "idle2", "busy"):
            ready(queue, worker)
        start_batch(queue, "batch_a", 41)
        take(queue, "busy", 1, 1)
        claims = take(queue, "w1", 1)
        for worker in ("idle1", "idle2", "busy"):
            assert take(queue, worker, 2) == []
        quarantine(queue, "w1", claims)
        assert [orders(queue, worker) for worker in ("idle1", "idle2", "busy")] == [["bell"], ["bell"], []]

    def test_a_worker_in_isolation_is_not_woken(self, queue: Queue, redis_client: redis.Redis) -> None:
        ready(queue, "w2")
        start_batch(queue, "batch_a", 1)
        quarantine(queue, "w1", take(queue, "w1", 1))
        take(queue, "w2", 1)
        assert take(queue, "w2", 2) == []
        assert not redis_client.sismember(keys.waiting(MODEL), "w2")

    def test_one_worker_is_ordered_to_make_room_when_none_has_any(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        for worker in ("w1", "w2", "w3"):
            ready(queue, worker)
        start_batch(queue, "batch_a", 100)
        claims = take(queue, "w1", 1, 60)
        busy = {worker: take(queue, worker, 1, 5) for worker in ("w2", "w3")}
        quarantine(queue, "w1", claims)
        assert len(take(queue, "w1", 2)) == 16
        tick(queue)
        assert [orders(queue, worker) for worker in ("w1", "w2", "w3")] == [[], [], []]
        wait_in_vain(redis_client)
        for _ in range(2):
            tick(queue)
        [ordered] = [worker for worker in ("w2", "w3") if orders(queue, worker) == ["isolate"]]
        assert sorted(orders(queue, worker) for worker in ("w1", "w2", "w3")) == [[], [], ["isolate"]]
        queue.requeue(ordered, held(busy[ordered]))
        assert {claim.engine_crashes for claim in take(queue, ordered, 2)} == {1}
        wait_in_vain(redis_client)
        tick(queue)
        assert [orders(queue, worker) for worker in ("w2", "w3")] == [
            ["isolate"],
            ["isolate"],
        ]  # w1 is at it, and so is the first

    def test_no_order_while_groups_are_taken_one_after_the_other(self, queue: Queue, redis_client: redis.Redis) -> None:
        ready(queue, "w1")
        ready(queue, "w2")
        start_batch(queue, "batch_a", 48)
        claims = take(queue, "w1", 1, 47)
        take(queue, "w2", 1)
        quarantine(queue, "w1", claims)
        wait_in_vain(redis_client)
        isolated = take(queue, "w1", 2)
        tick(queue)
        wait_in_vain(redis_client)
        queue.requeue("w1", held(isolated), cleared=True)
        assert len(take(queue, "w1", 3)) == 16
        tick(queue)
        assert "isolate" not in orders(queue, "w2")

    def test_a_clock_that_went_back_orders_nothing_and_waits_anew(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        ready(queue, "w2")
        start_batch(queue, "batch_a", 2)
        take(queue, "w2", 1, 1)
        quarantine(queue, "w1", take(queue, "w1", 1))
        redis_client.hincrby(keys.QUARANTINE_WAITS, MODEL, 3_600_000)
        tick(queue)
        assert orders(queue, "w2") == []
        wait_in_vain(redis_client)
        tick(queue)
        assert orders(queue, "w2") == ["isolate"]
