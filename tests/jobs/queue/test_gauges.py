"""What workers report of themselves, and how much waits."""

import redis

from jobs.queue import keys
from jobs.queue.gauges import GAUGES_SECONDS, GpuGauges, WorkerGauges
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, request, start_batch

GPU = GpuGauges("NVIDIA H200", "GPU-1", 0.5, 10, 20, 400.5)


def test_gauges_are_the_last_that_were_reported_and_do_not_last(queue: Queue, redis_client: redis.Redis) -> None:
    for running in (1, 2):
        queue.report_gauges("w", WorkerGauges(running, 0, 3.5, [GPU]))
    assert queue.gauges(["w", "silent"]) == {"w": WorkerGauges(2, 0, 3.5, [GPU])}
    assert queue.gauges([]) == {}
    assert 0 < redis_client.ttl(keys.gauges("w")) <= GAUGES_SECONDS


def test_what_waits_is_counted_by_model(queue: Queue, redis_client: redis.Redis) -> None:
    start_batch(queue, "batch_a", 3)
    start_batch(queue, "batch_b", 2)
    queue.create_batch("batch_c", 4)
    redis_client.sadd(keys.ACTIVE, "batch_a", "batch_b", "batch_c", "batch_that_was_removed")
    queue.submit("live_1", request())
    depths = queue.depths([MODEL, "other"])
    assert depths.live == {MODEL: 1, "other": 0}
    assert depths.batch == {MODEL: 5, "other": 0}
    assert depths.quarantined == {MODEL: 0, "other": 0}
    assert depths.batches == {"in_progress": 2, "validating": 1}


def test_unfinished_lines_count_whether_redis_holds_them_or_not(queue: Queue, redis_client: redis.Redis) -> None:
    shared = {"line_models": [MODEL, "other"], "completed": 2, "failed": 1}
    queue.create_batch("batch_a", 100, state="in_progress", fields=shared)
    queue.create_batch("batch_b", 50, state="in_progress", fields={"line_models": [MODEL]})
    queue.create_batch("batch_c", 50, state="finalizing", fields={"line_models": [MODEL]})
    redis_client.sadd(keys.ACTIVE, "batch_a", "batch_b", "batch_c", "batch_that_was_removed")
    queue.submit("live_1", request())
    assert queue.unfinished([MODEL, "other"]) == {MODEL: 49 + 50 + 1, "other": 49}
    assert queue.unfinished(["none"]) == {"none": 0}


def test_the_oldest_request_that_waits_has_its_age(queue: Queue, redis_client: redis.Redis) -> None:
    assert (queue.depths([MODEL]).oldest_live, queue.depths([MODEL]).oldest_batch) == ({}, {})
    for call in ("live_0", "live_1", "live_2"):
        queue.submit(call, request())
        redis_client.hset(keys.bodies(call), "since", int(1000 * (queue.now() - 60 + 10 * int(call[-1]))))
    for batch, age in (("batch_a", 300), ("batch_b", 900), ("batch_c", 5000)):
        queue.create_batch(batch, 1, state="in_progress", fields={"timestamps": {"created": queue.now() - age}})
        redis_client.sadd(keys.ACTIVE, batch)
    for batch in ("batch_a", "batch_b"):
        queue.ingest(batch, [(0, request())], 0, 1)
    depths = queue.depths([MODEL, "other"])
    assert (list(depths.oldest_live), list(depths.oldest_batch)) == ([MODEL], [MODEL])
    assert 60 <= depths.oldest_live[MODEL] < 3000
    assert 900 <= depths.oldest_batch[MODEL] < 5000  # of batch_c no line waits
    queue.claim("w", 1, 500, models=[MODEL])
    assert (queue.depths([MODEL]).oldest_live, queue.depths([MODEL]).oldest_batch) == ({}, {})


def test_each_end_of_a_batch_counts_once(queue: Queue) -> None:
    queue.create_batch("rebuilt", 1, state="completed")
    for batch, end in (("batch_a", "completed"), ("batch_b", "completed"), ("batch_c", "cancelled")):
        queue.create_batch(batch, 1)
        queue.transition(batch, ["validating"], "in_progress")
        for _ in range(2):
            queue.transition(batch, ["in_progress", end], end)
    assert queue.depths([]).ended == {"cancelled": 1, "completed": 2, "expired": 0, "failed": 0}


def test_ended_batches_cost_no_command(queue: Queue, redis_client: redis.Redis) -> None:
    def commands_of_a_look() -> int:
        before = _commands(redis_client)
        queue.depths([MODEL])
        return _commands(redis_client) - before

    few = commands_of_a_look()
    for number in range(50):
        queue.create_batch(f"batch_{number}", 1, state="completed")
    assert commands_of_a_look() == few


def _commands(client: redis.Redis) -> int:
    stats: dict[str, dict[str, int]] = client.info("commandstats")  # type: ignore[assignment]
    return sum(entry["calls"] for name, entry in stats.items() if name != "cmdstat_info")
