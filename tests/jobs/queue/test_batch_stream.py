"""The stream of a batch that a client reads: what workers say about all of its requests, in one
place.
"""

from collections.abc import Callable

import pytest
import redis

from jobs.protocol.requests import BatchEntry, Claim, RequestKey
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from tests.support.integrity import faults
from tests.support.requests import MODEL, delta, finished, pass_time, start_batch

LARGE = "many words " * 500


def read(queue: Queue, last_id: str) -> list[BatchEntry]:
    found = queue.read_batch("batch_a", last_id)
    assert found is not None
    return found


def begin(queue: Queue, lines: int = 3) -> list[Claim]:
    start_batch(queue, "batch_a", lines)
    return queue.claim("w1", 1, lines, models=[MODEL])


def test_holds_what_all_requests_of_the_batch_were_given(queue: Queue, redis_client: redis.Redis) -> None:
    one, two, three = begin(queue)
    last_id = queue.watch("batch_a", 60)
    queue.publish("w1", [delta(one, 0, [1, 2], "ab"), delta(two, 0, [3], "c")])
    queue.publish("w1", [delta(one, 2, [4], "d", 2)])
    queue.commit("w1", [finished(one, last=delta(one, 3, [5], "e", 3)), finished(two, status=500)])
    queue.requeue("w1", [(three.key, three.fence)])
    entries = read(queue, last_id)
    published = [
        (entry.key, [(chunk.token_ids, chunk.text) for chunk in entry.chunks], entry.succeeded) for entry in entries
    ]
    assert published == [
        (one.key, [([1, 2], "ab")], None),
        (two.key, [([3], "c")], None),
        (one.key, [([4], "d")], None),
        (one.key, [([5], "e")], True),
        (two.key, [], False),
    ]
    own = queue.read_tokens({one.key: "0-0"})
    assert [entry.entry_id for entry in entries if entry.key == one.key] == [entry.entry_id for entry in own]
    assert read(queue, entries[2].id) == entries[3:]
    assert queue.last_of_batch("batch_a") == entries[-1].id
    assert faults(redis_client) == []


def test_there_is_none_where_no_client_reads(queue: Queue, redis_client: redis.Redis) -> None:
    one, two, _ = begin(queue)
    queue.watch(two.key, 60)
    queue.publish("w1", [delta(one, 0, [1], "a"), delta(two, 0, [1], "a")])
    queue.commit("w1", [finished(one), finished(two)])
    assert not redis_client.exists(keys.batch_tokens("batch_a"))
    assert queue.last_of_batch("batch_a") is None
    assert queue.read_batch("batch_a", "0-0") is None


def test_of_two_batches_each_has_its_own(queue: Queue) -> None:
    start_batch(queue, "batch_a", 1)
    start_batch(queue, "batch_b", 1)
    claims = queue.claim("w1", 1, 2, models=[MODEL])
    last_id = queue.watch("batch_a", 60)
    queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims])
    assert [entry.key for entry in read(queue, last_id)] == [RequestKey("batch_a", 0)]
    assert queue.last_of_batch("batch_b") is None


def test_says_that_the_state_moved(queue: Queue) -> None:
    start_batch(queue, "batch_a", 1)
    last_id = queue.watch("batch_a", 60)
    queue.transition("batch_a", ["in_progress"], "in_progress")  # a sign of life
    queue.transition("batch_a", ["in_progress"], "finalizing")
    assert [(entry.key, entry.succeeded) for entry in read(queue, last_id)] == [(None, None)]


def test_lasts_as_long_as_the_longest_watch(queue: Queue, redis_client: redis.Redis) -> None:
    begin(queue)
    first = queue.watch("batch_a", 60)
    assert queue.watch("batch_a", 5) == first
    deadline = redis_client.zscore(keys.WATCHED, "batch_a")
    assert redis_client.pttl(keys.batch_tokens("batch_a")) > 50_000
    assert redis_client.execute_command("PEXPIRETIME", keys.batch_tokens("batch_a")) == deadline


def test_a_position_that_was_trimmed_or_is_of_another_stream_is_none(queue: Queue, redis_client: redis.Redis) -> None:
    one, _, _ = begin(queue)
    first = queue.watch("batch_a", 60)
    for index in range(0, 20_200, 100):
        queue.publish("w1", [delta(one, at, [1], "a", at) for at in range(index, index + 100)])
    assert queue.read_batch("batch_a", first) is None
    last = queue.last_of_batch("batch_a") or ""
    assert read(queue, last) == []
    assert queue.read_batch("batch_a", "9" * 19 + "-1") is None
    assert int(redis_client.xlen(keys.batch_tokens("batch_a"))) <= 20_100  # type: ignore[arg-type]
    redis_client.delete(keys.batch_tokens("batch_a"))
    queue.watch("batch_a", 60)
    assert queue.read_batch("batch_a", last) is None


def test_what_is_large_is_in_the_stream_of_its_request_only(queue: Queue) -> None:
    one, _, _ = begin(queue)
    last_id = queue.watch("batch_a", 60)
    queue.publish("w1", [delta(one, 0, [1], LARGE)])
    [(_, fields)] = queue.redis.xrange(keys.batch_tokens("batch_a"), f"({last_id}")  # type: ignore[misc]
    assert fields[b"p"] == b""
    [entry] = read(queue, last_id)
    assert [chunk.text for chunk in entry.chunks] == [LARGE]


@pytest.mark.parametrize(
    "end", [Queue.requeue, lambda queue, worker, held: pass_time(queue.redis, 100) or queue.reap()]
)
def test_what_was_begun_and_lies_idle_counts_as_running(queue: Queue, end: Callable[..., object]) -> None:
    one, two, three = begin(queue)
    queue.publish("w1", [delta(one, 0, [1], "a")])
    queue.commit("w1", [finished(two)])
    assert queue.running("batch_a") == [one.key, three.key]
    end(queue, "w1", [(one.key, one.fence)])
    assert queue.running("batch_a") == [one.key, three.key]
    assert queue.running("batch_a", limit=1) == [one.key]
    assert queue.running("batch") == []


@pytest.mark.parametrize(("watched", "most"), [(4, 20_000), (20, 4000), (200, 1000)])
def test_many_that_are_read_share_the_room_of_a_few(
    queue: Queue, redis_client: redis.Redis, watched: int, most: int
) -> None:
    one = begin(queue)[0]
    queue.watch("batch_a", 60)
    for number in range(watched - 1):
        queue.watch(f"batch_{number}", 60)
    queue.commands(
        ("XADD", keys.batch_tokens("batch_a"), "*", "k", "batch_a/1", "e", "1-0", "p", "", "s", "")
        for _ in range(most + 1000)
    )
    queue.publish("w1", [delta(one, 0, [1], "a")])
    assert most <= redis_client.xlen(keys.batch_tokens("batch_a")) <= most + 100
