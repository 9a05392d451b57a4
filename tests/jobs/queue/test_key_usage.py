"""What was computed for an API key: each answer counts once, whatever is repeated, and what was
saved raises the counts of a Redis that went back.
"""

import msgspec
import redis

from jobs.protocol.requests import Claim, Finished, RequestKey
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, held, request

USAGE = Usage(3, 5, 2, device_microseconds=2_000_001)


def start(queue: Queue, batch: str, lines: int, key_id: str) -> None:
    assert queue.create_batch(batch, lines, state="in_progress", fields={"key_id": key_id})
    assert queue.ingest(batch, [(line, request()) for line in range(lines)], 0, lines)


def claim(queue: Queue, worker: str = "w1", seq: int = 1) -> list[Claim]:
    return queue.claim(worker, seq, 100, models=[MODEL])


def answer(claim: Claim, status: int = 200, usage: Usage = USAGE) -> Finished:
    return Finished(claim.key, claim.fence, Result(status, b"{}", usage, "req_1"), None, claim.request.reply_to)


def counts(times: int) -> dict[str, int]:
    named = ("prompt_tokens", 3), ("completion_tokens", 5), ("device_microseconds", 2_000_001)
    return {name: times * count for name, count in named}


def test_lines_and_live_calls_count_for_their_key(queue: Queue) -> None:
    start(queue, "batch_a", 3, "key_a")
    start(queue, "batch_b", 2, "key_b")
    start(queue, "batch_c", 1, "")
    queue.submit("live_a", request(), "key_a")
    queue.submit("live_b", request())
    queue.commit("w1", [answer(each) for each in claim(queue)])
    assert queue.key_usage() == {"key_a": counts(4), "key_b": counts(2)}


def test_an_answer_that_comes_again_counts_once(queue: Queue) -> None:
    start(queue, "batch_a", 2, "key_a")
    queue.submit("live_a", request(), "key_a")
    claims = claim(queue)
    for _ in range(2):
        queue.commit("w1", [answer(each) for each in claims])
    assert queue.key_usage() == {"key_a": counts(3)}


def test_what_a_worker_computed_that_lost_its_lease_is_not_counted(queue: Queue) -> None:
    start(queue, "batch_a", 1, "key_a")
    [lost] = claim(queue)
    queue.reap("w1")
    [again] = claim(queue, "w2")
    queue.commit("w1", [answer(lost, usage=Usage(3, 5, device_microseconds=9))])
    queue.commit("w2", [answer(again)])
    assert queue.key_usage() == {"key_a": counts(1)}


def test_requests_that_end_without_an_answer_count_nothing(queue: Queue) -> None:
    start(queue, "batch_a", 2, "key_a")
    queue.submit("live_a", request(), "key_a")
    claims = claim(queue)
    queue.cancel([RequestKey("live_a", 0)])
    queue.quarantine("w1", held([each for each in claims if not each.live]), answer(claims[0], 500, Usage()).result)
    queue.remove_unfinished("batch_a")
    assert queue.key_usage() == {}


def test_a_result_of_a_worker_of_0_1_0_has_no_time(queue: Queue, redis_client: redis.Redis) -> None:
    """It lacks the field, which is read as 0."""
    start(queue, "batch_a", 1, "key_a")
    result = answer(claim(queue)[0]).result
    packed = msgspec.to_builtins(result, builtin_types=(bytes,))
    del packed["usage"]["device_microseconds"]
    redis_client.hset(keys.results("batch_a"), "0", msgspec.msgpack.encode(packed))
    assert queue.results("batch_a") == [(0, msgspec.structs.replace(result, usage=Usage(3, 5, 2)))]


def test_counts_are_raised_to_what_was_saved_and_never_lowered(queue: Queue) -> None:
    start(queue, "batch_a", 2, "key_a")
    queue.commit("w1", [answer(each) for each in claim(queue)])
    less, more = counts(1), {**counts(2), "prompt_tokens": 7}
    for saved, expected in ((less, counts(2)), (more, more)):
        for _ in range(2):
            queue.raise_key_usage({"key_a": saved, "key_b": counts(1)})
            assert queue.key_usage() == {"key_a": expected, "key_b": counts(1)}
    start(queue, "batch_b", 1, "key_a")
    queue.commit("w1", [answer(each) for each in claim(queue, seq=2)])
    assert queue.key_usage()["key_a"] == {**counts(3), "prompt_tokens": 10}, "it counts on from there"


def test_counts_stay_exact_beyond_the_digits_of_lua(queue: Queue, redis_client: redis.Redis) -> None:
    large = 10**15 + 1
    redis_client.hset(keys.KEY_USAGE, "key_a device_microseconds", large)
    start(queue, "batch_a", 1, "key_a")
    queue.commit("w1", [answer(each, usage=Usage(device_microseconds=large)) for each in claim(queue)])
    assert queue.key_usage()["key_a"]["device_microseconds"] == 2 * large
