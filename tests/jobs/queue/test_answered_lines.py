"""The note of which lines of a batch got their results, for a reader that follows it."""

import redis

from jobs.queue import keys
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, finished, start_batch


def test_commits_name_the_lines_that_they_answer_once(queue: Queue) -> None:
    start_batch(queue, "batch_a", 4, first=1)
    one, two, three, four = queue.claim("w1", 1, 4, models=[MODEL])
    queue.commit("w1", [finished(one)])
    last_id = queue.follow_answers("batch_a", 60)
    assert queue.commit("w1", [finished(one), finished(two), finished(three, status=500)]) == [one.key]
    lines, last_id = queue.answered("batch_a", last_id, 1.0)
    assert lines == [2, 3]
    queue.follow_answers("batch_a", 60)
    queue.commit("w1", [finished(four)])
    assert queue.answered("batch_a", last_id, 1.0)[0] == [4]


def test_nothing_is_noted_where_no_reader_follows(queue: Queue, redis_client: redis.Redis) -> None:
    start_batch(queue, "batch_a", 1)
    [one] = queue.claim("w1", 1, 1, models=[MODEL])
    queue.commit("w1", [finished(one)])
    assert not redis_client.exists(keys.answered("batch_a"))
    queue.follow_answers("batch_a", 60)
    assert 50_000 < redis_client.pttl(keys.answered("batch_a")) <= 60_000  # type: ignore[operator]
    queue.forget("batch_a")
    assert not redis_client.exists(keys.answered("batch_a"))


def test_results_of_some_lines_are_read_while_no_part_holds_them(queue: Queue) -> None:
    start_batch(queue, "batch_a", 30)
    claims = queue.claim("w1", 1, 30, models=[MODEL])
    queue.commit("w1", [finished(claim, str(claim.key.line)) for claim in claims if claim.key.line in (3, 9, 17)])
    assert queue.finished_of("batch_a", [17, 4, 3, 29, 500]) == [17, 3]
    assert queue.finished_of("batch_a", []) == []

    def bodies(lines: list[int], most_bytes: int = 1000) -> list[bytes | None]:
        return [result and result.body for result in queue.results_of("batch_a", lines, most_bytes)]

    assert bodies([17, 4, 3]) == [b'{"text":"17"}', None, b'{"text":"3"}']
    assert bodies([4, 17, 3], most_bytes=1) == [None, b'{"text":"17"}']
    assert queue.drained("batch_a", "part", [3])
    assert bodies([17, 4, 3]) == [b'{"text":"17"}', None, None]
    assert queue.finished_of("batch_a", [3, 4]) == [3]


def test_only_the_commits_of_a_batch_that_is_followed_pay_for_the_note(queue: Queue, redis_client: redis.Redis) -> None:
    """Also not with a command that changes nothing."""
    start_batch(queue, "batch_a", 3)
    one, two, _ = queue.claim("w1", 1, 3, models=[MODEL])

    def notes() -> int:
        return int(redis_client.info("commandstats").get("cmdstat_xadd", {}).get("calls", 0))

    before = notes()
    queue.commit("w1", [finished(one)])
    assert notes() == before
    queue.follow_answers("batch_a", 60)
    before = notes()
    queue.commit("w1", [finished(two)])
    assert notes() == before + 1
