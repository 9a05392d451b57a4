"""A Redis that is full takes results, which make room, before tokens, which do not; and no token is
left out of a stream.
"""

import asyncio
from collections.abc import Iterator

import pytest
import redis

from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.requests import MODEL, delta, finished, start_batch, text_in, token_ids_in
from workers.replica.leases import Held
from workers.replica.outbox import Outbox


@pytest.fixture
def full(redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """A client of a server that has no memory left once its fixture says so."""
    yield redis_client
    redis_client.config_set("maxmemory", 0)


def test_results_reach_a_full_redis_and_their_tokens_with_them(full: redis.Redis) -> None:
    queue = Queue(full, QueueSettings(redis_retry_seconds=0.05))
    start_batch(queue, "batch_a", 3)
    done, watched, running = queue.claim("w1", 1, 3, models=[MODEL])
    queue.watch(watched.key, 60)
    ended: list[Held] = []
    lost: list[Held] = []

    async def deliver() -> None:
        outbox = Outbox(queue, "w1", 2.0, lambda: 7, ended.extend, lost.extend)
        await outbox.deliver([delta(running, 0, [1], "a"), delta(watched, 0, [1], "a")])
        full.config_set("maxmemory", 1)
        outbox.finish(finished(done))
        await outbox.deliver([delta(done, 0, [5], "e"), delta(running, 1, [2], "b", 1), delta(watched, 1, [2], "b", 1)])
        assert ended == [(done.key, done.fence)]
        outbox.finish(finished(watched, last=delta(watched, 2, [3], "c", 2)))
        await outbox.deliver([])
        full.config_set("maxmemory", 0)
        await outbox.deliver([delta(running, 2, [3], "c", 2)])
        outbox.close()

    asyncio.run(deliver())
    assert {line for line, _ in queue.results("batch_a")} == {done.key.line, watched.key.line}
    assert lost == []
    assert queue.token_totals().generated == 7
    for key in (running.key, watched.key):
        entries = queue.read_tokens({key: "0-0"})
        assert [token for entry in entries for token in token_ids_in(entry)] == [1, 2, 3]
        assert "".join(text_in(entry) for entry in entries) == "abc"
