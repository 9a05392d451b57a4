"""Claims, leases, commits: each rule of the request path, and each script repeated as after a lost
reply.
"""

import itertools

import pytest
import redis
from msgspec.structs import replace

from jobs.protocol.requests import ChoiceCheckpoint, Delta, Finished, RequestCheckpoint, RequestKey, TokenChunk
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import parse_api_entry
from tests.support.integrity import faults
from tests.support.requests import (
    MODEL,
    delta,
    finished,
    held,
    lines,
    pass_time,
    read_api,
    ready_length,
    request,
    start_batch,
    text_in,
    token_ids_in,
)
from tests.support.rollback import EarlierRedis

LEASE = 30.0
API_IDS = ("api0", "api1")


@pytest.fixture
def ticking(redis_client: redis.Redis) -> Queue:
    """A queue whose ticker has run for so long that no restart of the server holds it back from
    reaping.
    """
    queue = Queue(redis_client, QueueSettings(lease_seconds=LEASE, worker_deaths=3))
    queue.reap()
    pass_time(redis_client, LEASE)
    return queue


@pytest.fixture(autouse=True)
def _sound(redis_client: redis.Redis):
    yield
    assert faults(redis_client) == []


def take(
    queue: Queue, worker: str, seq: int, limit: int = 10, models: list[str] | None = None, live_limit: int | None = None
):
    return queue.claim(worker, seq, limit, models=models or [MODEL], live_limit=live_limit)


def checkpoint(token_ids: list[int], text_length: int) -> RequestCheckpoint:
    return RequestCheckpoint({0: ChoiceCheckpoint(token_ids, text_length)})


def commit_all(queue: Queue, worker: str, claims) -> None:
    assert queue.commit(worker, [finished(claim) for claim in claims]) == []


class TestClaim:
    def test_gives_lines_in_the_order_of_the_ready_list(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 5)
        claims = take(queue, "w1", 1, 3)
        assert lines(claims) == [0, 1, 2]
        assert [claim.attempt for claim in claims] == [1, 1, 1]
        assert claims[0].request == request()
        assert claims[0].checkpoint is None
        assert not claims[0].live
        assert lines(take(queue, "w2", 1)) == [3, 4]

    def test_fences_rise(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 3)
        fences = [claim.fence for claim in take(queue, "w1", 1)]
        assert fences == sorted(set(fences))
        # Seeded from the time, so that an emptied server never gives an old one
        assert fences[0] > 1e15

    def test_the_same_number_gives_the_same_set(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 6)
        first = take(queue, "w1", 1, 3)
        assert take(queue, "w1", 1, 3) == first
        second = take(queue, "w1", 2, 3)
        assert lines(second) == [3, 4, 5]
        assert take(queue, "w1", 1, 3) == []  # a late duplicate
        assert take(queue, "w1", 2, 3) == second

    def test_a_repeat_leaves_out_what_was_lost_or_committed_meanwhile(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 3)
        claims = take(queue, "w1", 1)
        commit_all(queue, "w1", claims[:1])
        queue.requeue("w1", held(claims[1:2]))
        assert lines(take(queue, "w1", 1)) == [2]

    def test_only_lines_of_served_models(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2, model="a")
        start_batch(queue, "batch_b", 2, model="b")
        assert {claim.request.model for claim in take(queue, "w1", 1, models=["b"])} == {"b"}
        assert take(queue, "w1", 2, models=["b"]) == []
        assert {claim.request.model for claim in take(queue, "w1", 3, models=["b", "a"])} == {"a"}

    def test_a_batch_of_several_models(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 4, state="in_progress")
        queue.ingest("batch_a", [(line, request("ab"[line % 2])) for line in range(4)], 0, 4)
        assert lines(take(queue, "w1", 1, models=["a"])) == [0, 2]
        assert lines(take(queue, "w2", 1, models=["b"])) == [1, 3]

    @pytest.mark.parametrize("state", ["cancelling", "finalizing", "expired"])
    def test_nothing_of_a_batch_that_is_not_in_progress(self, queue: Queue, state: str) -> None:
        start_batch(queue, "batch_a", 2)
        assert queue.transition("batch_a", ["in_progress"], state)
        assert take(queue, "w1", 1) == []

    def test_nothing_of_a_batch_with_too_many_undrained_results(self, redis_client: redis.Redis) -> None:
        queue = Queue(redis_client, QueueSettings(undrained_bytes=100))
        start_batch(queue, "batch_a", 4)
        commit_all(queue, "w1", take(queue, "w1", 1, 2))
        assert queue.batch_fields("batch_a").result_bytes > 100
        assert take(queue, "w1", 2) == []
        assert queue.drained("batch_a", "part-0", [0, 1])
        assert lines(take(queue, "w1", 3)) == [2, 3]

    def test_more_than_one_call_may_hold(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1200)
        claims = take(queue, "w1", 1, 1200)
        assert len(claims) == 500
        assert queue.publish("w1", [delta(claim, 0, [1]) for claim in claims]) == []
        claims += take(queue, "w1", 2, 1200)
        claims += take(queue, "w1", 3, 1200)
        assert queue.renew("w1", held(claims)) == []
        commit_all(queue, "w1", claims)
        assert queue.batch_fields("batch_a").completed == 1200


class TestFairness:
    def test_a_small_batch_is_not_stuck_behind_a_large_one(self, queue: Queue) -> None:
        start_batch(queue, "batch_large", 400)
        assert len(take(queue, "w1", 1, 100)) == 100
        start_batch(queue, "batch_small", 20)
        claims = take(queue, "w1", 2, 64)
        assert sum(claim.key.batch == "batch_small" for claim in claims) == 20

    def test_batches_of_one_tenant_take_turns(self, queue: Queue) -> None:
        for number in range(4):
            start_batch(queue, f"batch_{number}", 100)
        counts = dict.fromkeys(range(4), 0)
        for seq in range(16):
            for claim in take(queue, "w1", seq, 5):
                counts[int(claim.key.batch[-1])] += 1
        assert max(counts.values()) - min(counts.values()) <= 5

    def test_tenants_share_however_many_batches_they_have(self, queue: Queue) -> None:
        start_batch(queue, "batch_lone", 100, tenant="lone")
        for number in range(5):
            start_batch(queue, f"batch_{number}", 100, tenant="many")
        claims = [claim for seq in range(10) for claim in take(queue, "w1", seq, 10)]
        assert 40 <= sum(claim.key.batch == "batch_lone" for claim in claims) <= 60

    @pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")])
    def test_service_is_counted_in_tokens(self, queue: Queue, tenants: tuple[str, str]) -> None:
        """Lines that cost nine times as much get a ninth of the turns, whether of another tenant or
        another batch of the same.
        """
        costs = {"batch_short": 100, "batch_long": 900}
        for batch, tenant in zip(costs, tenants, strict=True):
            start_batch(queue, batch, 2000, tenant=tenant)
        taken = dict.fromkeys(costs, 0)
        for seq in range(100):
            claims = take(queue, "w1", seq, 16)
            for batch in costs if seq >= 10 else ():
                taken[batch] += sum(claim.key.batch == batch for claim in claims)
            for claim in claims:
                usage = Usage(50, costs[claim.key.batch] - 50)
                queue.commit("w1", [Finished(claim.key, claim.fence, Result(200, b"{}", usage, "req_1"))])
        assert taken["batch_short"] / taken["batch_long"] == pytest.approx(9, rel=0.15)

    @pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")])
    def test_a_list_that_runs_empty_wipes_out_no_service(self, queue: Queue, tenants: tuple[str, str]) -> None:
        """One batch's lines come in portions that one claim takes whole, the other's never end:
        both get as many tokens.
        """
        costs = {"batch_portions": 2010, "batch_steady": 20}
        received, cursors = dict.fromkeys(costs, 0), dict.fromkeys(costs, 0)
        for batch, tenant in zip(costs, tenants, strict=True):
            assert queue.create_batch(batch, 100_000, tenant=tenant, state="in_progress")
        for seq in range(600):
            for batch, portion in (("batch_portions", 4), ("batch_steady", 64)):
                if ready_length(queue, batch) < portion // 2:
                    start, end = cursors[batch], cursors[batch] + portion
                    assert queue.ingest(batch, [(line, request()) for line in range(start, end)], start, end)
                    cursors[batch] = end
            claims = take(queue, "w1", seq, 8)
            usages = [Usage(10, costs[claim.key.batch] - 10) for claim in claims]
            for claim, usage in zip(claims, usages, strict=True):
                received[claim.key.batch] += usage.prompt_tokens + usage.completion_tokens if seq >= 100 else 0
            results = [Result(200, b"{}", usage, "req_1") for usage in usages]
            queue.commit(
                "w1", [Finished(claim.key, claim.fence, result) for claim, result in zip(claims, results, strict=True)]
            )
        assert received["batch_steady"] / 1.5 <= received["batch_portions"] <= received["batch_steady"] * 1.5, received

    def test_who_comes_anew_starts_level_with_who_was_served_alone(self, queue: Queue) -> None:
        start_batch(queue, "batch_long", 2000, tenant="old")
        for seq in range(50):
            commit_all(queue, "w1", take(queue, "w1", seq, 16))
        queue.remove_unfinished("batch_long")
        start_batch(queue, "batch_new", 400, tenant="new")
        start_batch(queue, "batch_old", 400, tenant="old")
        claims = [claim for seq in range(10) for claim in take(queue, "w1", 50 + seq, 32)]
        assert 140 <= sum(claim.key.batch == "batch_old" for claim in claims) <= 180

    def test_lines_whose_cost_is_unknown_go_by_their_size(self, queue: Queue) -> None:
        for batch, size in (("batch_short", 0), ("batch_long", 16 * 1024 - 4 * 256)):
            queue.create_batch(batch, 400, tenant=batch, state="in_progress")
            queue.ingest(batch, [(line, request(body=b"x" * size)) for line in range(400)], 0, 400)
        claims = [claim for seq in range(20) for claim in take(queue, "w1", seq, 16)]
        assert sum(claim.key.batch == "batch_short" for claim in claims) / len(claims) > 0.85

    def test_neighbors_stay_together(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 100)
        start_batch(queue, "batch_b", 100)
        batches = [claim.key.batch for claim in take(queue, "w1", 1, 64)]
        assert sum(a != b for a, b in itertools.pairwise(batches)) == 3


class TestLive:
    def test_overtakes_batch_work(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 10)
        queue.submit("live_a", request())
        claims = take(queue, "w1", 1, 3)
        assert str(claims[0].key) == "live_a/0"
        assert claims[0].live
        assert lines(claims[1:]) == [0, 1]

    def test_repeated_submit_changes_nothing(self, queue: Queue) -> None:
        for _ in range(2):
            queue.submit("live_a", request())
        claims = take(queue, "w1", 1)
        queue.submit("live_a", request())
        assert len(claims) == 1
        assert take(queue, "w1", 2) == []
        commit_all(queue, "w1", claims)
        queue.submit("live_a", request())
        assert take(queue, "w1", 3) == []

    def test_a_full_worker_takes_live_calls_only(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 10)
        for number in range(3):
            queue.submit(f"live_{number}", request())
        assert all(claim.live for claim in take(queue, "w1", 1, 0, live_limit=8))
        assert len(take(queue, "w1", 2, 2, live_limit=8)) == 2

    def test_batch_work_keeps_its_tenth_under_endless_live_load(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 400)
        taken = {True: 0, False: 0}
        for seq in range(200):
            for number in range(10):
                queue.submit(f"live_{seq}_{number}", request())
            for claim in take(queue, "w1", seq, 4):
                taken[claim.live] += 1
        assert taken[False] / sum(taken.values()) == pytest.approx(0.1, abs=0.02)

    def test_live_calls_take_everything_when_no_batch_waits(self, queue: Queue) -> None:
        for number in range(40):
            queue.submit(f"live_{number}", request())
        assert len(take(queue, "w1", 1, 40)) == 40


class TestFences:
    """A worker that lost its lease changes nothing with its old fence."""

    @pytest.fixture
    def stale(self, queue: Queue):
        start_batch(queue, "batch_a", 1)
        [old] = take(queue, "w1", 1)
        queue.publish("w1", [delta(old, 0, [1, 2], "ab")])
        queue.reap("w1")
        [new] = take(queue, "w2", 1)
        assert new.fence > old.fence
        return old, new

    def test_publish(self, queue: Queue, stale) -> None:
        old, new = stale
        assert queue.publish("w1", [delta(old, 2, [9], "x", 2)]) == [old.key]
        entries = queue.read_tokens({new.key: "0-0"})
        assert [token_ids_in(entry) for entry in entries] == [[1, 2]]

    def test_renew(self, queue: Queue, stale, redis_client: redis.Redis) -> None:
        old, new = stale
        before = redis_client.zscore(keys.LEASES, str(new.key))
        assert queue.renew("w1", held([old])) == [old.key]
        assert redis_client.zscore(keys.LEASES, str(new.key)) == before

    def test_commit(self, queue: Queue, stale) -> None:
        old, new = stale
        assert queue.commit("w1", [finished(old, "stale")]) == [old.key]
        assert queue.results("batch_a") == []
        assert queue.commit("w2", [finished(new, "fresh")]) == []
        assert queue.commit("w1", [finished(old, "stale")]) == [old.key]
        [(line, result)] = queue.results("batch_a")
        assert (line, result.body) == (0, b'{"text":"fresh"}')
        assert queue.batch_fields("batch_a").completed == 1

    def test_requeue(self, queue: Queue, stale) -> None:
        old, new = stale
        assert queue.requeue("w1", held([old])) == [old.key]
        assert ready_length(queue, "batch_a") == 0
        assert queue.renew("w2", held([new])) == []

    def test_an_old_fence_of_the_worker_that_holds_the_request_again(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        [old] = take(queue, "w1", 1)
        queue.requeue("w1", held([old]))
        [new] = take(queue, "w1", 2)
        assert queue.publish("w1", [delta(old, 0, [9], "x")]) == [old.key]
        assert queue.commit("w1", [finished(old, "stale")]) == [old.key]
        assert queue.requeue("w1", held([old])) == [old.key]
        assert queue.results("batch_a") == []
        assert queue.commit("w1", [finished(new)]) == []

    def test_a_right_fence_from_another_worker(self, queue: Queue, stale) -> None:
        _, new = stale
        assert queue.commit("w1", [finished(new)]) == [new.key]


class TestCommit:
    def test_after_tokens_that_the_server_forgot(self, queue: Queue) -> None:
        """The stream of a live call has no hole; a line that has its result needs no stream."""
        start_batch(queue, "b", 1)
        queue.submit("live_a", request(reply_to="api1"))
        claims = take(queue, "w", 1)
        assert queue.publish("w", [delta(claim, 0, [1, 2]) for claim in claims]) == []
        live, line = sorted(claims, key=lambda claim: not claim.live)
        ends = [finished(claim, last=delta(claim, 3, [4])) for claim in claims]
        assert queue.commit("w", ends) == [live.key]
        [again] = take(queue, "v", 1)
        assert (again.key, again.checkpoint, again.attempt) == (live.key, checkpoint([1, 2], 0), 1)
        assert [number for number, _ in queue.results("b")] == [line.key.line]

    def test_moves_counts_and_leaves_only_the_result(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 3)
        claims = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims])
        assert queue.commit("w1", [finished(claims[0]), finished(claims[1], status=400)]) == []
        fields = queue.batch_fields("batch_a")
        assert (fields.completed, fields.failed) == (1, 1)
        assert [line for line, _ in queue.results("batch_a")] == [0, 1]
        assert queue.done("batch_a") == b"\xc0"
        assert redis_client.exists(keys.tokens("batch_a/0"), keys.tokens("batch_a/1")) == 0
        assert redis_client.exists(keys.tokens("batch_a/2")) == 1

    def test_repeated(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        claims = take(queue, "w1", 1)
        items = [finished(claim) for claim in claims]
        assert queue.commit("w1", items) == []
        assert queue.commit("w1", items) == [claim.key for claim in claims]
        assert queue.batch_fields("batch_a").completed == 2

    def test_of_a_line_that_is_done_counts_nothing(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 2)
        claims = take(queue, "w1", 1)
        # As after a restore from the parts on disk
        queue.transition("batch_a", ["in_progress"], "in_progress", done=b"\x80")
        queue.set_parts("batch_a", 0, {"part-0": 1})
        redis_client.hset(keys.batch("batch_a"), "completed", 1)
        commit_all(queue, "w1", claims)
        assert [line for line, _ in queue.results("batch_a")] == [1]
        assert queue.batch_fields("batch_a").completed == 2

    def test_of_a_live_call_ends_its_stream(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [], accepted=True)])
        queue.publish("w1", [delta(claim, 0, [5, 6], "ab")])
        item = finished(claim, last=delta(claim, 2, [7], "c", 2))
        assert queue.commit("w1", [item]) == []
        queue.commit("w1", [item])
        entries = queue.read_tokens({claim.key: "0-0"})
        assert [(entry.entry_id, token_ids_in(entry), text_in(entry)) for entry in entries] == [
            ("0-1", [], ""),
            ("2-0", [5, 6], "ab"),
            ("3-2", [7], "c"),
        ]
        assert entries[0].accepted
        assert entries[2].result == item.result
        assert [entry for _, entry in read_api(queue, "api1")] == entries
        assert 0 < redis_client.ttl(keys.tokens("live_a/0")) <= 300
        assert 0 < redis_client.ttl(keys.api("api1")) <= 300

    def test_the_first_entry_of_a_call_names_its_workers_fingerprint(self, queue: Queue) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        accepted = replace(delta(claim, 0, [], accepted=True), system_fingerprint="fp_1")
        assert queue.publish("w1", [accepted, delta(claim, 0, [5], "a")]) == []
        entries = queue.read_tokens({claim.key: "0-0"})
        assert [(entry.entry_id, entry.accepted, entry.system_fingerprint) for entry in entries] == [
            ("0-1", True, "fp_1"),
            ("1-0", False, None),
        ]
        assert [entry for _, entry in read_api(queue, "api1")] == entries

    def test_without_last_tokens(self, queue: Queue) -> None:
        queue.submit("live_a", request())
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5, 6], "ab")])
        commit_all(queue, "w1", [claim])
        assert [(entry.entry_id, token_ids_in(entry)) for entry in queue.read_tokens({claim.key: "0-0"})] == [
            ("2-0", [5, 6]),
            ("2-2", []),
        ]

    def test_rejects_a_live_call_that_never_started(self, queue: Queue) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        assert queue.commit("w1", [finished(claim, "too long", status=400)]) == []
        [(_, entry)] = read_api(queue, "api1")
        assert entry.result is not None
        assert entry.result.status == 400

    def test_notifies_the_control_plane_of_the_last_line(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        claims = take(queue, "w1", 1)
        seen = queue.control_messages(keys.JOBS_CONTROL, "0-0", 0)
        assert [message.batch for message in seen] == ["batch_a"]  # the ready list ran empty
        commit_all(queue, "w1", claims[:1])
        assert queue.control_messages(keys.JOBS_CONTROL, seen[-1].id, 0) == []
        commit_all(queue, "w1", claims[1:])
        assert [message.kind for message in queue.control_messages(keys.JOBS_CONTROL, seen[-1].id, 0)] == ["batch"]


class TestPublish:
    def test_repeated_writes_nothing_twice(self, queue: Queue) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        for _ in range(2):
            assert queue.publish("w1", [delta(claim, 0, [5], "a"), delta(claim, 1, [6, 7], "bc", 1)]) == []
        assert [token_ids_in(entry) for entry in queue.read_tokens({claim.key: "0-0"})] == [[5], [6, 7]]
        assert len(read_api(queue, "api1")) == 2

    def test_of_a_large_entry_is_stored_once(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5], "x" * 5000)])
        queue.publish("w1", [delta(claim, 1, [6], "y" * 3000, 5000)])
        [large], [whole] = [parse_api_entry(fields) for _, fields in redis_client.xrange(keys.api("api1"))]
        assert (large.name, large.entry_id, large.chunks) == (str(claim.key), "1-0", None)
        assert [whole.entry(claim.key)] == queue.read_tokens({claim.key: "1-0"})

    @pytest.mark.parametrize(("size", "repeated"), [(12_000, True), (20_000, False)])
    def test_a_result_of_some_size_comes_to_its_api_whole(
        self, queue: Queue, redis_client: redis.Redis, size: int, repeated: bool
    ) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        queue.commit("w1", [finished(claim, "x" * size)])
        [[item]] = [parse_api_entry(fields) for _, fields in redis_client.xrange(keys.api("api1"))]
        assert item.entry_id == "0-2"
        assert (item.result is not None) == repeated

    def test_what_is_published_together_comes_to_an_api_together(self, queue: Queue, redis_client: redis.Redis) -> None:
        for number in range(40):
            queue.submit(f"live_{number:02d}", request(reply_to=f"api{number % 2}"))
        claims = take(queue, "w1", 1, limit=40)
        refused = claims[0].key, claims[0].fence + 1
        foreign = Delta(*refused, 1, [TokenChunk(0, 0, [9], "foreign", 0)], "api0")
        accepted = [Delta(claim.key, claim.fence, 0, [], claim.request.reply_to, accepted=True) for claim in claims]
        assert queue.publish("w1", [foreign, *accepted]) == [claims[0].key]
        tokens = [delta(claim, 0, [5], "x" * (300 if claim is claims[2] else 5000)) for claim in claims[:4]]
        queue.publish("w1", tokens)
        found = [[len(parse_api_entry(fields)) for _, fields in redis_client.xrange(keys.api(api))] for api in API_IDS]
        assert found == [[20, 2], [20, 2]]
        for api in API_IDS:
            entries = [entry for _, entry in read_api(queue, api)]
            assert [entry.accepted for entry in entries] == [len(entry.chunks) == 0 for entry in entries]
            for key in {entry.key for entry in entries}:
                assert [entry for entry in entries if entry.key == key] == queue.read_tokens({key: "0-0"})

    def test_a_large_group_is_cut(self, queue: Queue, redis_client: redis.Redis) -> None:
        for number in range(12):
            queue.submit(f"live_{number:02d}", request(reply_to="api0"))
        claims = take(queue, "w1", 1, limit=12)
        assert queue.publish("w1", [delta(claim, 0, [5], "x" * 3000) for claim in claims]) == []
        found = [fields[b"g"] for _, fields in redis_client.xrange(keys.api("api0"))]
        assert [len(parse_api_entry({b"g": group})) for group in found] == [3, 3, 3, 3]
        assert len(read_api(queue, "api0")) == 12

    def test_after_tokens_that_the_server_forgot(self, queue: Queue) -> None:
        start_batch(queue, "b", 1)
        (claim,) = queue.claim("w", 1, 1, models=[MODEL])
        assert queue.publish("w", [delta(claim, 0, [1, 2])]) == []
        assert queue.publish("w", [delta(claim, 3, [4])]) == [claim.key]
        (again,) = queue.claim("v", 1, 1, models=[MODEL])
        assert again.checkpoint is not None
        assert again.checkpoint.choices[0].token_ids == [1, 2]
        assert again.attempt == 1

    def test_live_calls_after_a_server_that_went_back(self, queue: Queue, redis_client: redis.Redis) -> None:
        """Those that lost tokens are taken from the worker when it publishes for them again."""
        for name in ("live_a", "live_b", "live_c"):
            queue.submit(name, request())
        early, late, silent = claims = take(queue, "w1", 1, limit=3)
        assert queue.publish("w1", [delta(claim, 0, [], accepted=True) for claim in claims]) == []
        assert queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims]) == []
        earlier = EarlierRedis(redis_client)
        assert queue.publish("w1", [delta(claim, 1, [2], "b", 1) for claim in (early, late)]) == []
        earlier.restore()
        assert queue.publish("w1", [delta(early, 2, [3], "c", 2)]) == [early.key]
        assert queue.publish("w1", [delta(silent, 1, [2], "b", 1)]) == []
        assert queue.publish("w1", [delta(late, 2, [3], "c", 2)]) == [late.key]
        assert queue.publish("w1", [delta(silent, 2, [3], "c", 2)]) == []
        again = take(queue, "w2", 1, limit=3)
        assert {claim.key for claim in again} == {early.key, late.key}
        assert [claim.checkpoint.choices[0].token_ids for claim in again if claim.checkpoint] == [[1], [1]]

    def test_lines_after_a_server_that_went_back(self, queue: Queue, redis_client: redis.Redis) -> None:
        """Also where the same worker published what is lost."""
        start_batch(queue, "batch_a", 2)
        early, silent = claims = take(queue, "w1", 1)
        assert queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims]) == []
        earlier = EarlierRedis(redis_client)
        assert queue.publish("w1", [replace(delta(early, 1, [2], "b", 1), continues=True)]) == []
        earlier.restore()
        later = [replace(delta(early, 2, [3], "c", 2), continues=True)]
        assert queue.publish("w1", [*later, replace(delta(silent, 1, [2], "b", 1), continues=True)]) == [early.key]
        assert queue.publish("w1", [replace(delta(silent, 2, [3], "c", 2), continues=True)]) == []
        [again] = take(queue, "w2", 1)
        assert (again.key, again.checkpoint, again.attempt) == (early.key, checkpoint([1], 1), 1)

    def test_a_line_whose_checkpoint_the_server_forgot(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 1)
        (claim,) = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [1, 2], "ab")])
        queue.requeue("w1", held([claim]))
        (again,) = take(queue, "w2", 1)
        redis_client.delete(keys.tokens(str(claim.key)))
        first, second = delta(again, 2, [3], "c", 2), replace(delta(again, 3, [4], "d", 3), continues=True)
        assert queue.publish("w2", [first, second]) == [again.key] * 2

    def test_a_live_call_whose_checkpoint_the_server_forgot(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request())
        (claim,) = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [1, 2], "ab")])
        queue.requeue("w1", held([claim]))
        (again,) = take(queue, "w2", 1)
        redis_client.delete(keys.tokens(str(claim.key)))
        assert (
            queue.publish("w2", [delta(again, 2, [], accepted=True), delta(again, 2, [3], "c", 2)]) == [again.key] * 2
        )

    def test_text_that_is_not_ascii(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5], "äé😀"), delta(claim, 1, [6], "ß", 3)])
        queue.requeue("w1", held([claim]))
        [again] = take(queue, "w1", 2)
        assert again.checkpoint == checkpoint([5, 6], 4)

    def test_reading_waits_for_the_next_entry(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        [claim] = take(queue, "w1", 1)
        assert queue.read_tokens({claim.key: "0-0"}, timeout=0.01) == []
        queue.publish("w1", [delta(claim, 0, [5])])
        [entry] = queue.read_tokens({claim.key: "0-0"}, timeout=5)
        assert queue.read_tokens({claim.key: entry.entry_id}, timeout=0.01) == []


class TestRequeue:
    def test_goes_to_the_front_in_order_and_counts_no_attempt(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 6)
        claims = take(queue, "w1", 1, 4)
        for _ in range(2):
            queue.requeue("w1", held(claims[1:]))
        assert ready_length(queue, "batch_a") == 5
        again = take(queue, "w2", 1)
        assert lines(again) == [1, 2, 3, 4, 5]
        assert {claim.attempt for claim in again} == {1}

    def test_live_call(self, queue: Queue) -> None:
        queue.submit("live_a", request())
        queue.submit("live_b", request())
        claims = take(queue, "w1", 1, 1)
        queue.requeue("w1", held(claims))
        assert [claim.key.batch for claim in take(queue, "w2", 1)] == ["live_a", "live_b"]

    def test_hands_the_checkpoint_along(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1)
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5, 6], "ab"), delta(claim, 2, [7], "c", 2)])
        queue.requeue("w1", held([claim]))
        [again] = take(queue, "w2", 1)
        assert again.checkpoint == checkpoint([5, 6, 7], 3)
        assert take(queue, "w2", 1) == [again]
        queue.publish("w2", [delta(again, 3, [8], "d", 3)])
        assert [entry.entry_id for entry in queue.read_tokens({again.key: "0-0"})] == ["2-0", "3-0", "4-0"]


class TestReap:
    def test_a_dead_worker(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 6)
        claims = take(queue, "w1", 1, 4)
        take(queue, "w2", 1, 1)
        assert queue.reap("w1") == 4
        assert queue.reap("w1") == 0
        again = take(queue, "w3", 1)
        assert lines(again) == [0, 1, 2, 3, 5]
        assert [claim.attempt for claim in again] == [2, 2, 2, 2, 1]
        assert queue.renew("w1", held(claims)) == [claim.key for claim in claims]
        assert take(queue, "w1", 2) == []  # what a dead worker sent last arrives late
        assert 0 < redis_client.ttl(keys.claim("w1")) <= 30

    def test_many(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 700)
        take(queue, "w1", 1, 500)
        take(queue, "w1", 2, 500)
        assert queue.reap("w1") == 700

    def test_hands_the_checkpoint_along(self, queue: Queue) -> None:
        queue.submit("live_a", request(reply_to="api1"))
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [5, 6], "ab")])
        queue.reap("w1")
        [again] = take(queue, "w2", 1)
        assert (again.attempt, again.checkpoint) == (2, checkpoint([5, 6], 2))

    def test_leases_that_ran_out(self, ticking: Queue, redis_client: redis.Redis) -> None:
        start_batch(ticking, "batch_a", 2)
        claims = take(ticking, "w1", 1)
        pass_time(redis_client, LEASE / 2)
        assert ticking.renew("w1", held(claims[:1])) == []
        assert ticking.reap() == 0
        pass_time(redis_client, LEASE / 2)
        assert ticking.reap() == 1
        assert ticking.renew("w1", held(claims)) == [claims[1].key]
        assert lines(take(ticking, "w2", 1)) == [1]

    def test_waits_one_lease_after_the_server_was_away(self, ticking: Queue, redis_client: redis.Redis) -> None:
        start_batch(ticking, "batch_a", 1)
        claims = take(ticking, "w1", 1)
        now = int(redis_client.time()[0] * 1000)
        redis_client.zadd(keys.LEASES, {str(claims[0].key): now - 60_000})
        redis_client.hset(keys.TICK, mapping={"time": now - 30_000})
        assert ticking.reap() == 0
        assert ticking.renew("w1", held(claims)) == []
        redis_client.hset(keys.TICK, mapping={"run_id": "another"})
        redis_client.zadd(keys.LEASES, {str(claims[0].key): now - 60_000})
        assert ticking.reap() == 0
        pass_time(redis_client, LEASE / 2)
        assert ticking.reap() == 0
        pass_time(redis_client, LEASE / 2)
        assert ticking.reap() == 1

    def test_the_first_look_reaps_nothing(self, redis_client: redis.Redis) -> None:
        queue = Queue(redis_client, QueueSettings(lease_seconds=LEASE))
        start_batch(queue, "batch_a", 1)
        [claim] = take(queue, "w1", 1)
        redis_client.zadd(keys.LEASES, {str(claim.key): 1})
        assert queue.reap() == 0
        pass_time(redis_client, LEASE)
        assert queue.reap() == 1

    def test_a_clock_that_went_back(self, ticking: Queue, redis_client: redis.Redis) -> None:
        """By an hour: what was not renewed since ends one lease later, what was renewed is kept."""
        start_batch(ticking, "batch_a", 2)
        claims = take(ticking, "w1", 1)
        hour = 3_600_000
        redis_client.zincrby(keys.LEASES, hour, str(claims[0].key))
        redis_client.hincrby(keys.TICK, "time", hour)
        redis_client.hincrby(keys.TICK, "reap_after", hour)
        assert ticking.reap() == 0
        pass_time(redis_client, LEASE / 2)
        assert ticking.renew("w1", held(claims[1:])) == []
        assert ticking.reap() == 0
        pass_time(redis_client, LEASE / 2)
        assert ticking.reap() == 1
        assert ticking.renew("w1", held(claims)) == [claims[0].key]

    def test_too_many_deaths_end_in_an_error(self, ticking: Queue) -> None:
        start_batch(ticking, "batch_a", 1)
        ticking.submit("live_a", request(reply_to="api1"))
        for attempt in range(1, 4):
            claims = take(ticking, f"w{attempt}", 1)
            assert {claim.attempt for claim in claims} == {attempt}
            assert ticking.reap(f"w{attempt}") == 2
        assert take(ticking, "w4", 1) == []
        [(_, result)] = ticking.results("batch_a")
        assert (result.status, b"worker_lost" in result.body) == (500, True)
        assert ticking.batch_fields("batch_a").failed == 1
        [(_, entry)] = read_api(ticking, "api1")
        assert entry.result is not None
        assert entry.result.status == 500


def test_names_with_colons_keep_apart(queue: Queue) -> None:
    for batch, model, tenant in (("batch_a", "m", "a:b"), ("batch_b", "m:a", "b")):
        start_batch(queue, batch, 1, tenant=tenant, model=model)
    assert [claim.key.batch for claim in take(queue, "w1", 1, models=["m"])] == ["batch_a"]
    assert [claim.key.batch for claim in take(queue, "w2", 1, models=["m:a"])] == ["batch_b"]


class TestCancel:
    def test_waiting_live_call(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.submit("live_a", request())
        for _ in range(2):
            queue.cancel([RequestKey("live_a", 0)])
        assert take(queue, "w1", 1) == []
        assert redis_client.exists(keys.bodies("live_a")) == 0

    def test_running_live_call(self, queue: Queue) -> None:
        queue.submit("live_a", request())
        [claim] = take(queue, "w1", 1)
        queue.publish("w1", [delta(claim, 0, [1])])
        for _ in range(2):
            queue.cancel([claim.key])
        [message] = queue.control_messages("w1", "0-0", 0)
        assert (message.kind, message.keys) == ("cancel", [claim.key])
        assert queue.commit("w1", [finished(claim)]) == [claim.key]
        assert queue.read_tokens({claim.key: "0-0"}) == []

    def test_batch(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1100)
        claims = take(queue, "w1", 1, 20)
        take(queue, "w2", 1, 400)
        commit_all(queue, "w1", claims[:5])
        assert queue.transition("batch_a", ["in_progress"], "cancelling")
        for _ in range(2):
            queue.remove_unfinished("batch_a")
        for worker in ("w1", "w2"):
            orders = queue.control_messages(worker, "0-0", 0)
            assert [(order.batch, order.keys) for order in orders if order.kind == "cancel"] == [("batch_a", [])] * len(
                orders
            )
            assert 1 <= len(orders) <= 3, "one for each call of the script that found lines of the worker"
        assert (ready_length(queue, "batch_a"), queue.window_bytes("batch_a")) == (0, 0)
        assert queue.renew("w1", held(claims[5:])) == [claim.key for claim in claims[5:]]
        assert queue.requeue("w1", held(claims[5:6])) == [claims[5].key]
        assert len(queue.results("batch_a")) == 5


class TestEmptyAtTheEnd:
    def test_every_key_goes_away(self, queue: Queue, redis_client: redis.Redis) -> None:
        for batch in ("batch_a", "batch_b"):
            start_batch(queue, batch, 20, tenant=batch)
        queue.submit("live_a", request(reply_to="api1"))
        queue.submit("live_b", request())
        queue.watch(RequestKey("batch_a", 3), 60)
        seq = 0
        while claims := take(queue, "w1", (seq := seq + 1), 7):
            queue.publish("w1", [delta(claim, 0, [1, 2], "ab", accepted=claim.live) for claim in claims])
            back = claims[: seq % 2]
            queue.requeue("w1", held(back))
            commit_all(queue, "w1", claims[len(back) :])
            queue.cancel([claim.key for claim in claims[len(back) :] if claim.live])
        queue.drained("batch_a", "part-0", range(20))
        for batch in ("batch_a", "batch_b"):
            queue.forget(batch)
            queue.forget(batch)
        queue.remove_worker("w1")
        staying = {name.decode() for name in redis_client.scan_iter() if redis_client.ttl(name) < 0}
        assert staying <= keys.PERMANENT
