"""What workers tell of themselves, and how much waits."""

import redis

from jobs import keys
from jobs.gauges import GAUGES_SECONDS, CardGauges, WorkerGauges
from jobs.queue import Queue
from tests.support.requests import MODEL, request, start_batch

CARD = CardGauges("NVIDIA H200", "GPU-1", 0.5, 10, 20, 400.5)


def test_gauges_are_the_last_that_were_reported_and_do_not_last(queue: Queue, redis_client: redis.Redis) -> None:
    for running in (1, 2):
        queue.report_gauges("w", WorkerGauges(running, 0, 5, 10, 100, 3.5, [CARD]))
    assert queue.gauges(["w", "silent"]) == {"w": WorkerGauges(2, 0, 5, 10, 100, 3.5, [CARD])}
    assert queue.gauges([]) == {}
    assert 0 < redis_client.ttl(keys.gauges("w")) <= GAUGES_SECONDS


def test_what_waits_is_counted_by_model(queue: Queue) -> None:
    start_batch(queue, "batch_a", 3)
    start_batch(queue, "batch_b", 2)
    queue.create_batch("batch_c", 4)
    queue.submit("live_1", request())
    depths = queue.depths([MODEL, "other"], queue.batches())
    assert depths.live == {MODEL: 1, "other": 0}
    assert depths.batch == {MODEL: 5, "other": 0}
    assert depths.suspects == {MODEL: 0, "other": 0}
    assert depths.batches == {"in_progress": 2, "validating": 1}
