"""What the control plane does with batches: records moved by compare-and-set, lines fed, results
drained, everything forgotten.
"""

from collections.abc import Iterator

import pytest
import redis

from jobs.protocol.requests import RequestKey, pack
from jobs.protocol.results import Result, Usage
from jobs.protocol.states import END_STATES, JOBS
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields
from jobs.queue.batch_records import MAX_PART_LINES
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.queue.settings import QueueSettings
from tests.support.integrity import faults
from tests.support.requests import MODEL, delta, finished, held, ready_length, request, start_batch


class TestTransition:
    def test_moves_only_from_the_states_given(self, queue: Queue) -> None:
        assert queue.create_batch("batch_a", 3, fields={"root": "/store/a"})
        assert not queue.create_batch("batch_a", 9)
        assert queue.transition("batch_a", ["validating"], "in_progress", {"total": 4})
        assert not queue.transition("batch_a", ["validating"], "failed")
        found = queue.batch_fields("batch_a")
        assert found == BatchFields(state="in_progress", total=4, root="/store/a", token=found.token)
        assert queue.batches() == ["batch_a"]

    def test_of_another_generation_changes_nothing(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 3)
        assert queue.transition("batch_a", ["validating"], "validating", {"generation": 1}, generation=0)
        assert not queue.transition("batch_a", ["validating"], "in_progress", generation=0)
        assert queue.transition("batch_a", ["validating"], "in_progress", generation=1)

    def test_sets_the_lines_that_are_done_or_changes_nothing(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 9)
        for done in (b"\x60", b""):
            assert queue.transition("batch_a", ["validating"], "validating", done=done)
            assert not queue.transition("batch_a", ["in_progress"], "in_progress", done=b"\xff")
            assert not queue.transition("batch_a", ["validating"], "validating", generation=1, done=b"\xff")
            assert queue.transition("batch_a", ["validating"], "validating")
            assert queue.done("batch_a").rstrip(b"\0") == done

    def test_with_early_lines_of_another_input_changes_nothing(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 0)
        assert queue.transition("batch_a", ["validating"], "validating", stamp="1 1")
        assert queue.ingest_early("batch_a", [(1, request())], "1 1")
        assert not queue.transition("batch_a", ["validating"], "in_progress", stamp="1 2")
        assert queue.batch_fields("batch_a").state == "validating"
        assert queue.transition("batch_a", ["validating"], "in_progress", stamp="1 1")

    def test_without_a_record(self, queue: Queue) -> None:
        assert not queue.transition("batch_a", ["in_progress"], "cancelling")
        assert queue.batch_fields("batch_a") == BatchFields()
        assert queue.batches() == []


class TestIngest:
    def test_moves_the_cursor_once(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 4, state="in_progress")
        rows = [(line, request()) for line in range(4)]
        assert queue.ingest("batch_a", rows[:2], 0, 2)
        assert queue.ingest("batch_a", rows[:2], 0, 2)
        assert not queue.ingest("batch_a", rows[:3], 0, 3)
        assert not queue.ingest("batch_a", rows[3:], 3, 4)
        assert ready_length(queue, "batch_a") == 2
        assert queue.ingest("batch_a", rows[2:], 2, 4)
        assert ready_length(queue, "batch_a") == 4
        assert queue.window_bytes("batch_a") > 4 * len(request().body)

    def test_skips_lines_that_are_done(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.create_batch("batch_a", 8, state="in_progress", fields={"completed": 2})
        queue.transition("batch_a", ["in_progress"], "in_progress", done=b"\x60")
        queue.set_parts("batch_a", 0, {"part-0": 2})
        assert queue.ingest("batch_a", [(line, request()) for line in range(4)], 0, 4)
        assert [claim.key.line for claim in queue.claim("w1", 1, 9, models=[MODEL])] == [0, 3]
        assert queue.done("batch_a") == b"\x60"
        assert queue.parts("batch_a") == {"part-0": 2}
        assert faults(redis_client) == []

    @pytest.mark.parametrize("state", ["validating", "cancelling"])
    def test_only_in_progress(self, queue: Queue, state: str) -> None:
        queue.create_batch("batch_a", 1, state=state)
        assert not queue.ingest("batch_a", [(0, request())], 0, 1)
        assert ready_length(queue, "batch_a") == 0

    def test_too_many_lines_in_one_call(self, queue: Queue) -> None:
        with pytest.raises(ValueError, match="at most 500"):
            queue.ingest("batch_a", [(0, request())] * 501, 0, 501)


def test_a_look_at_a_window_is_one_round_trip(queue: Queue, redis_client: redis.Redis) -> None:
    start_batch(queue, "batch_a", 3)
    queue.announce("", "batch_a", listed=False, runs=True)
    redis_client.config_resetstat()
    window = queue.window("batch_a")
    assert redis_client.info("stats")["total_reads_processed"] <= 2  # with that of INFO
    assert window == (queue.window_lines("batch_a"), queue.window_bytes("batch_a"), 1)
    assert window[0] == 3


class TestDiscard:
    def test_leaves_nothing_of_lines_that_finished_run_or_wait(self, queue: Queue, redis_client: redis.Redis) -> None:
        lines = 2 * MAX_ITEMS + 5
        queue.create_batch("batch_a", 0)
        queue.watch("batch_a", 60)
        for first in range(0, lines, MAX_ITEMS):
            rows = [(line, request()) for line in range(first, min(lines, first + MAX_ITEMS))]
            assert queue.ingest_early("batch_a", rows, "1 1")
        for seq in (1, 2, 3):
            claims = queue.claim("w1", seq, 400, models=[MODEL])
            queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims])
            queue.commit("w1", [finished(claim) for claim in claims[:300]])
        assert redis_client.keys("{q}:tok:*")
        assert queue.discard("batch_a", "validating", 0)
        record = queue.batch_fields("batch_a")
        assert (record.completed, record.result_bytes, record.body_bytes, record.early) == (0, 0, 0, "")
        names = set(map(bytes.decode, redis_client.keys("*batch_a*")))
        assert names - {keys.served(keys.ring(MODEL, ""), "batch_a")} == {
            keys.batch("batch_a"),
            keys.batch_tokens("batch_a"),
        }
        assert [entry.key for entry in queue.read_batch("batch_a", queue.discarded_at("batch_a")) or []] == []
        assert faults(redis_client) == []

    @pytest.mark.parametrize(("state", "generation"), [("validating", 1), ("cancelling", 0)])
    def test_of_another_state_or_generation_changes_nothing(self, queue: Queue, state: str, generation: int) -> None:
        queue.create_batch("batch_a", 0)
        assert queue.ingest_early("batch_a", [(1, request()), (2, request())], "1 1")
        queue.commit("w1", [finished(claim) for claim in queue.claim("w1", 1, 1, models=[MODEL])])
        assert not queue.discard("batch_a", state, generation)
        assert (queue.undrained_lines("batch_a"), queue.window_lines("batch_a")) == (1, 1)
        assert queue.batch_fields("batch_a").early == "1 1"

    def test_lines_of_a_killed_call_are_of_no_input(self, queue: Queue) -> None:
        queue.create_batch("batch_a", 0)
        assert queue.ingest_early("batch_a", [(line, request()) for line in range(4)], "1 1")
        queue.commit("w1", [finished(claim) for claim in queue.claim("w1", 1, 4, models=[MODEL])])
        assert queue._scripts.call("discard", ["batch_a", "validating", 0, 1]) == 1
        assert queue.undrained_lines("batch_a") == 3
        assert not queue.ingest_early("batch_a", [(9, request())], "1 1")
        assert not queue.transition("batch_a", ["validating"], "in_progress", stamp="1 1")
        assert queue.discard("batch_a", "validating", 0)
        assert queue.ingest_early("batch_a", [(9, request())], "1 1")
        assert queue.transition("batch_a", ["validating"], "in_progress", stamp="1 1")


class TestDrain:
    def test_results_stay_until_their_part_is_registered(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 5)
        claims = queue.claim("w1", 1, 5, models=[MODEL])
        queue.commit("w1", [finished(claim, str(claim.key.line)) for claim in reversed(claims)])
        assert [line for line, _ in queue.results("batch_a", limit=3)] == [0, 1, 2]
        assert [result.body for _, result in queue.results("batch_a")] == [b'{"text":"%d"}' % line for line in range(5)]
        assert queue.drained("batch_a", "part-0", [0, 1, 2])
        assert [line for line, _ in queue.results("batch_a")] == [3, 4]
        assert queue.parts("batch_a") == {"part-0": 3}

    def test_a_line_counts_in_one_part_only(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 3)
        queue.commit("w1", [finished(claim) for claim in queue.claim("w1", 1, 3, models=[MODEL])])
        assert queue.drained("batch_a", "part-0", [0, 1])
        assert not queue.drained("batch_a", "part-1", [1, 2])
        assert queue.drained("batch_a", "part-0", [0, 1])
        assert [line for line, _ in queue.results("batch_a")] == [2]
        assert queue.parts("batch_a") == {"part-0": 2}

    def test_a_whole_part_at_once(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", MAX_PART_LINES)
        seq = 0
        while claims := queue.claim("w1", (seq := seq + 1), 500, models=[MODEL]):
            queue.commit("w1", [finished(claim) for claim in claims])
        there = [line for line, _ in queue.results("batch_a")]
        assert there == list(range(MAX_PART_LINES))
        assert queue.drained("batch_a", "part-0", there)
        assert queue.batch_fields("batch_a").result_bytes == 0
        assert redis_client.exists(keys.results("batch_a")) == 0
        with pytest.raises(ValueError, match="in one part"):
            queue.drained("batch_a", "part-1", range(MAX_PART_LINES + 1))

    def test_no_command_reads_or_removes_line_by_line_or_all_at_once(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        queue.create_batch("batch_a", 20_000, state="in_progress")
        value = pack(Result(200, b"{}", Usage(), "req_1"))
        redis_client.hset(keys.results("batch_a"), mapping={str(line): value for line in range(20_000)})
        redis_client.config_resetstat()
        there = [line for line, _ in queue.results("batch_a")]
        assert len(set(there)) == MAX_PART_LINES
        assert queue.drained("batch_a", "part-0", there)
        stats = redis_client.info("commandstats")
        assert stats["cmdstat_hdel"]["calls"] == 1
        assert stats["cmdstat_hscan"]["calls"] <= 4 * MAX_PART_LINES / MAX_ITEMS
        assert stats.keys().isdisjoint({"cmdstat_hkeys", "cmdstat_hgetall", "cmdstat_hvals"})
        assert redis_client.hlen(keys.results("batch_a")) == 20_000 - MAX_PART_LINES
        drained = set(there)
        while more := {line for line, _ in queue.results("batch_a")}:
            assert drained.isdisjoint(more)
            assert queue.drained("batch_a", f"part-{len(drained)}", sorted(more))
            drained |= more
        assert drained == set(range(20_000))


class TestRestore:
    """Redis learns of lines on disk that it takes for waiting, running or undrained."""

    def test_lines_on_disk_are_done_with_their_outcome_there(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 8)
        claims = queue.claim("w1", 1, 4, models=[MODEL])
        queue.commit("w1", [finished(claim, status=400 * (claim.key.line // 2) or 200) for claim in claims[:3]])
        queue.restore("batch_a", "part-0", 5, [(line, line % 2 == 0) for line in (0, 2, 3, 4, 7)])
        record = queue.batch_fields("batch_a")
        assert (record.completed, record.failed) == (4, 2)  # line 1 too, whose result is here
        assert [line for line, _ in queue.results("batch_a")] == [1]
        assert queue.parts("batch_a") == {"part-0": 5}
        assert queue.renew("w1", held(claims)) == [claim.key for claim in claims]
        assert [claim.key.line for claim in queue.claim("w2", 1, 9, models=[MODEL])] == [5, 6]
        assert faults(redis_client) == []

    @pytest.mark.parametrize("state", sorted(END_STATES))
    def test_nothing_of_a_batch_that_has_ended(self, queue: Queue, redis_client: redis.Redis, state: str) -> None:
        queue.create_batch("batch_a", 2, state=state, fields={"completed": 2})
        before = queue.batch_fields("batch_a")
        queue.restore("batch_a", "part-0", 2, [(0, True), (1, True)])
        assert queue.batch_fields("batch_a") == before
        assert not redis_client.exists(keys.done("batch_a"), keys.parts("batch_a"))

    @pytest.mark.parametrize("state", sorted(END_STATES))
    def test_no_parts_of_a_batch_that_has_ended(self, queue: Queue, redis_client: redis.Redis, state: str) -> None:
        queue.create_batch("batch_a", 2, state=state)
        queue.set_parts("batch_a", 0, {"part-0": 2})
        queue.set_parts("batch_of_no_record", 0, {"part-0": 2})
        assert not redis_client.exists(keys.parts("batch_a"), keys.parts("batch_of_no_record"))

    @pytest.mark.parametrize("state", sorted(JOBS))
    def test_parts_are_set_under_the_generation_of_the_batch(self, queue: Queue, state: str) -> None:
        queue.create_batch("batch_a", 2, state=state)
        queue.set_parts("batch_a", 0, {f"part-{number}": number for number in range(4500)})
        assert len(queue.parts("batch_a")) == 4500
        queue.set_parts("batch_a", 0, {"part-0": 2})
        queue.set_parts("batch_a", 1, {"part-1": 1})
        assert queue.parts("batch_a") == {"part-0": 2}
        queue.set_parts("batch_a", 0, {})
        assert queue.parts("batch_a") == {}

    def test_a_part_of_many_lines_is_registered_with_the_last(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 1200)
        queue.restore("batch_a", "part-0", 1200, [(line, True) for line in range(1200)])
        assert (queue.batch_fields("batch_a").completed, queue.parts("batch_a")) == (1200, {"part-0": 1200})
        assert queue.claim("w1", 1, 9, models=[MODEL]) == []
        assert faults(redis_client) == []

    def test_outcomes_are_sent_as_they_come(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 1500)

        def outcomes() -> Iterator[tuple[int, bool]]:
            for line in range(1500):
                assert queue.batch_fields("batch_a").completed == line // MAX_ITEMS * MAX_ITEMS
                yield line, True

        queue.restore("batch_a", "part-0", 1500, outcomes())
        assert queue.batch_fields("batch_a").completed == 1500

    def test_a_long_list_is_not_pushed_line_by_line(self, queue: Queue, redis_client: redis.Redis) -> None:
        start_batch(queue, "batch_a", 10_000)
        redis_client.config_resetstat()
        queue.restore("batch_a", "part-0", 1000, [(line, True) for line in range(1000)])
        assert redis_client.info("commandstats")["cmdstat_rpush"]["calls"] < 20
        assert [claim.key.line for claim in queue.claim("w1", 1, 3, models=[MODEL])] == [1000, 1001, 1002]
        assert faults(redis_client) == []

    def test_a_batch_that_results_kept_out_runs_again(self, redis_client: redis.Redis) -> None:
        queue = Queue(redis_client, QueueSettings(undrained_bytes=100))
        start_batch(queue, "batch_a", 4)
        claims = queue.claim("w1", 1, 2, models=[MODEL])
        queue.commit("w1", [finished(claim, "x" * 200) for claim in claims])
        assert queue.claim("w1", 2, 2, models=[MODEL]) == []
        queue.restore("batch_a", "part-0", 2, [(claim.key.line, True) for claim in claims])
        assert len(queue.claim("w1", 3, 2, models=[MODEL])) == 2


def test_low_water_is_reported_once_for_each_crossing(queue: Queue) -> None:
    start_batch(queue, "batch_a", 10)
    queue.transition("batch_a", ["in_progress"], "in_progress", {"low_water": 4})

    def reports() -> int:
        return len(queue.control_messages(keys.JOBS_CONTROL, "0-0", 0))

    queue.claim("w1", 1, 5, models=[MODEL])
    assert reports() == 0
    queue.claim("w1", 2, 2, models=[MODEL])
    assert reports() == 1
    queue.claim("w1", 3, 9, models=[MODEL])
    assert reports() == 1


@pytest.mark.parametrize("moved_on", [False, True])
def test_an_ended_batch_is_cleaned_unless_it_was_begun_again(
    queue: Queue, redis_client: redis.Redis, moved_on: bool
) -> None:
    start_batch(queue, "batch_a", 1)
    queue.announce("", "batch_a", listed=False, runs=True)
    queue.transition("batch_a", ["in_progress"], "completed")
    read = queue.batch_fields("batch_a")
    if moved_on:
        queue.transition("batch_a", ["completed"], "in_progress")
    queue.clean("batch_a", read)
    assert [redis_client.exists(keys.bodies("batch_a")), len(queue.active_batches())] == [moved_on, moved_on]
    assert (redis_client.ttl(keys.batch("batch_a")) > 0) is not moved_on


def test_the_batches_that_ended_last_are_noted(queue: Queue, redis_client: redis.Redis) -> None:
    for number in range(103):
        queue.create_batch(f"batch_{number}", 0, state="completed")
        queue.clean(f"batch_{number}", queue.batch_fields(f"batch_{number}"))
        redis_client.zadd(keys.ENDED, {f"batch_{number}": number})  # long ago, each later than the one before
    assert list(queue.ended_batches(3)) == ["batch_102", "batch_101", "batch_100"]
    assert len(queue.ended_batches(1000)) == 100
    queue.forget("batch_102")
    assert list(queue.ended_batches(1)) == ["batch_101"]


def test_forget_leaves_nothing(queue: Queue, redis_client: redis.Redis) -> None:
    start_batch(queue, "batch_a", 1200)
    claims = queue.claim("w1", 1, 30, models=[MODEL])
    queue.commit("w1", [finished(claim) for claim in claims[:10]])
    queue.watch("batch_a", 60)
    queue.forget("batch_a")
    queue.forget("batch_a")
    assert queue.commit("w1", [finished(claim) for claim in claims[10:]]) == [claim.key for claim in claims[10:]]
    queue.remove_worker("w1")
    assert {name.decode() for name in redis_client.scan_iter() if redis_client.ttl(name) < 0} <= keys.PERMANENT
    assert queue.batches() == []


def test_running_lists_requests_with_a_lease(queue: Queue) -> None:
    start_batch(queue, "batch_a", 5)
    queue.claim("w1", 1, 2, models=[MODEL])
    assert queue.running("batch_a") == [RequestKey("batch_a", 0), RequestKey("batch_a", 1)]
    assert queue.running("batch_b") == []
