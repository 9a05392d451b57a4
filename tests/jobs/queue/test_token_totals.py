"""How many tokens were generated and delivered: each counts once, whatever is repeated, and a
worker's outlive it.
"""

import pytest
import redis

from jobs.protocol.requests import Claim
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, delta, finished, held, request, start_batch

ANSWER = 5  # completion tokens of `finished`


def claim(queue: Queue, worker: str, lines: int = 10) -> list[Claim]:
    return queue.claim(worker, 1, lines, models=[MODEL])


class TestGenerated:
    def test_counts_what_is_new_in_a_workers_own_count(self, queue: Queue) -> None:
        # 20: it arrives late
        for count, total in ((0, 0), (10, 10), (10, 10), (25, 25), (20, 25), (30, 30)):
            queue.renew("w1", [], count)
            assert queue.token_totals().generated == total
        queue.renew("w2", [], 7)
        assert queue.token_totals() == (37, 0)

    def test_outlives_the_worker_and_is_not_added_again(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.renew("w1", [], 10)
        queue.remove_worker("w1")
        assert queue.token_totals().generated == 10
        queue.renew("w1", [], 12)  # it was only stopped for long
        queue.remove_worker("w1")
        assert queue.token_totals().generated == 12
        assert 0 < redis_client.ttl(keys.counted("w1")) <= 86400

    def test_what_goes_out_is_counted_with_it(self, queue: Queue) -> None:
        """A worker that is killed has counted all that it published or delivered, between two
        renewals too.
        """
        start_batch(queue, "batch_a", 2)
        first, second = claim(queue, "w1")
        queue.renew("w1", held([first, second]), 1)
        for _ in range(2):
            queue.publish("w1", [delta(second, 0, [1, 2, 3])], 4)
        assert queue.token_totals().generated == 4
        for _ in range(2):
            queue.commit("w1", [finished(first)], 4 + ANSWER)
        queue.publish("w1", [delta(second, 0, [1, 2, 3])], 4)  # it arrives late
        queue.reap("w1")
        queue.commit("w1", [finished(second)], 20)  # struck off, it was only stopped for long
        assert queue.token_totals() == (20, ANSWER)

    def test_of_more_leases_than_one_call_may_hold(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 500)
        start_batch(queue, "batch_b", 500)
        claims = [*claim(queue, "w1", 500), *queue.claim("w1", 2, 500, models=[MODEL])]
        assert queue.renew("w1", held(claims), 99) == []
        assert queue.token_totals().generated == 99


class TestDelivered:
    def test_counts_where_a_bit_flips_or_a_live_call_ends(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        queue.submit("live_a", request())
        items = [finished(one) for one in claim(queue, "w1")]
        for _ in range(2):
            queue.commit("w1", items)
        assert queue.token_totals() == (0, 3 * ANSWER)

    @pytest.mark.parametrize("live", [False, True])
    def test_not_what_came_too_late_or_was_cancelled(self, queue: Queue, live: bool) -> None:
        if live:
            queue.submit("live_a", request())
        else:
            start_batch(queue, "batch_a", 1)
        [old] = claim(queue, "w1")
        queue.reap("w1")
        [new] = claim(queue, "w2")
        queue.commit("w1", [finished(old)])
        queue.cancel([new.key])
        queue.commit("w2", [finished(new)])
        assert queue.token_totals() == (0, 0)


def test_a_request_that_ended_counts_once(queue: Queue) -> None:
    start_batch(queue, "batch_a", 3)
    queue.submit("live_a", request())
    queue.submit("live_b", request())
    claims = claim(queue, "w1")
    cancelled = [one.key for one in claims if one.key.batch == "live_b"]
    queue.cancel(cancelled)
    for _ in range(2):
        queue.commit("w1", [finished(one, status=500 if one.key.live else 200) for one in claims])
    assert queue.requests_ended() == 4


def test_in_flight_is_what_unfinished_requests_have_published(queue: Queue) -> None:
    start_batch(queue, "batch_a", 4)
    first, second, third, _ = claim(queue, "w1")
    queue.watch(first.key, 60)
    queue.publish("w1", [delta(first, 0, [1, 2]), delta(second, 0, [1, 2, 3]), delta(third, 0, [1])])
    queue.commit("w1", [finished(first)])
    queue.requeue("w1", held([third]))
    assert queue.tokens_in_flight() == 4
