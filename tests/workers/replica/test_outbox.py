"""A Redis that is full takes results, which make room, before tokens, which do not; and no token is
left out of a stream.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from jobs.protocol.requests import Delta, Finished, RequestKey
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.requests import MODEL, delta, finished, request, start_batch, text_in, token_ids_in
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


def test_a_call_that_is_accepted_twice_at_once_is_no_fault(queue: Queue) -> None:
    """A Redis that went back may give it out again, under the same fence."""

    async def accept() -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        outbox = Outbox(queue, "w1", 2.0, lambda: 0, lambda _: None, lambda _: None)
        acceptance = Delta(RequestKey("live_1", 0), 7, 0, [], "api", True, "")
        for _ in range(2):
            outbox.accept_later(acceptance)
        outbox.accept_later(Delta(RequestKey("live_2", 0), 7, 0, [], "api", True, ""))
        while outbox._acceptances:
            await asyncio.sleep(0.01)
        outbox.close()
        return faults

    assert asyncio.run(accept()) == []


def test_tokens_that_a_full_redis_refused_come_before_later_ones(full: redis.Redis) -> None:
    """Also where it has room again between the two."""
    queue = Queue(full, QueueSettings(redis_retry_seconds=0.05))
    queue.submit("live_a", request())
    [live] = queue.claim("w1", 1, 1, models=[MODEL])

    def due(index: int) -> Iterator[list[Delta]]:
        full.ping()  # Redis has seen by now what was sent before
        full.config_set("maxmemory", 0)
        yield [delta(live, index, [index], "abc"[index], index)]

    async def deliver() -> None:
        outbox = Outbox(queue, "w1", 2.0, lambda: 7, lambda held: None, lambda held: None)
        await outbox.deliver([delta(live, 0, [0], "a")])
        full.config_set("maxmemory", 1)
        await outbox.deliver([delta(live, 1, [1], "b", 1)])
        outbox.live_tokens_wait()
        running = asyncio.create_task(outbox.run(lambda live_only: due(2), lambda: False))
        while queue.token_totals().generated == 0 or len(queue.read_tokens({live.key: "2-0"})) == 0:
            await asyncio.sleep(0.001)
        running.cancel()
        outbox.close()

    asyncio.run(asyncio.wait_for(deliver(), 60))
    entries = queue.read_tokens({live.key: "0-0"})
    assert [token for entry in entries for token in token_ids_in(entry)] == [0, 1, 2]


def test_no_checkpoint_has_a_hole_where_a_delivery_was_given_up(
    full: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread still sends while the next delivery collects what Redis refused."""
    queue = Queue(full, QueueSettings(redis_retry_seconds=0.5))
    start_batch(queue, "batch_a", 1)
    [claim] = queue.claim("w1", 1, 1, models=[MODEL])
    first, *later = (delta(claim, index, [index], "abcd"[index], index) for index in range(4))
    given_up, next_one, last = (replace(each, continues=True) for each in later)
    lost: list[Held] = []
    is_collected, publish = threading.Event(), queue.publish

    def publish_once_collected(worker: str, deltas: list[Delta], generated: int = 0) -> list[RequestKey]:
        assert is_collected.wait(60)
        return publish(worker, deltas, generated)

    async def deliver() -> None:
        outbox = Outbox(queue, "w1", 2.0, lambda: 7, lambda held: None, lost.extend)
        await outbox.deliver([first])
        full.config_set("maxmemory", 1)
        monkeypatch.setattr(queue, "publish", publish_once_collected)
        sent = asyncio.create_task(outbox.deliver([given_up]))
        while outbox._is_answered:
            await asyncio.sleep(0.001)
        sent.cancel()
        following = asyncio.create_task(outbox.deliver([next_one]))
        await asyncio.wait({sent})  # by then the next one has collected
        is_collected.set()
        while not outbox._refused:
            await asyncio.sleep(0.001)
        full.config_set("maxmemory", 0)
        await following
        await outbox.deliver([last])
        outbox.close()

    asyncio.run(asyncio.wait_for(deliver(), 60))
    [entry, *more] = queue.read_tokens({claim.key: "0-0"})
    assert [token_ids_in(entry), more] == [[0], []]
    assert (claim.key, claim.fence) in lost


@pytest.mark.parametrize("in_time", [True, False])
def test_a_result_that_comes_soon_stands_for_the_first_message(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr("workers.replica.outbox.COALESCE_SECONDS", 600.0 if in_time else 0.001)
    queue = Queue(redis_client)
    queue.submit("live_a", request())
    [live] = queue.claim("w1", 1, 1, models=[MODEL])
    ended: list[Held] = []

    async def run() -> None:
        outbox = Outbox(queue, "w1", 2.0, lambda: 0, ended.extend, lambda held: None)
        running = asyncio.create_task(outbox.run(lambda live_only: [], lambda: False))
        outbox.accept_later(delta(live, 0, [], accepted=True))
        while not in_time and not queue.read_tokens({live.key: "0-0"}):
            await asyncio.sleep(0.001)
        outbox.finish(finished(live))
        while not ended:
            await asyncio.sleep(0.001)
        running.cancel()
        outbox.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    entries = queue.read_tokens({live.key: "0-0"})
    assert [(entry.accepted, entry.result is not None) for entry in entries] == [(True, False), (False, True)][in_time:]


class RecordingQueue(Queue):
    """Notes what each call brings, and takes the replies of publishes only while `open`."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.open = threading.Event()
        self.open.set()
        self.began = threading.Event()
        self.sent: deque[int] = deque()
        self.published: list[int] = []
        self.committed: list[list[str]] = []

    def publish(self, worker: str, deltas: list[Delta], generated: int = 0) -> list[RequestKey]:
        self.sent.append(len(deltas))
        return super().publish(worker, deltas, generated)

    def publish_command(self, worker: str, deltas: list[Delta], generated: int) -> list[Any]:
        self.sent.append(len(deltas))
        return super().publish_command(worker, deltas, generated)

    def take_publish_reply(self, worker: str, reply: Any) -> list[RequestKey]:
        self.began.set()
        assert self.open.wait(60)
        self.published.append(self.sent.popleft())
        return super().take_publish_reply(worker, reply)

    def commit(self, worker: str, finished: list[Finished], generated: int = 0) -> list[RequestKey]:
        self.committed.append([str(one.key) for one in finished])
        return super().commit(worker, finished, generated)


def test_what_comes_while_tokens_are_sent_goes_together(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a live call are not held back otherwise; results of batches are, here until they
    are asked for.
    """
    monkeypatch.setattr("workers.replica.outbox.COALESCE_SECONDS", 3600.0)
    queue = RecordingQueue(redis_client)
    queue.submit("live_a", request())
    start_batch(queue, "batch_a", 2)
    live, *of_batch = queue.claim("w1", 1, 3, models=[MODEL])
    tokens = [delta(live, index, [index], "x", index) for index in range(5)]
    asked: list[bool] = []

    async def run() -> None:
        outbox = Outbox(queue, "w1", 2.0, lambda: 7, lambda held: None, lambda held: None)
        fresh: list[Delta] = []

        def due(live_only: bool) -> list[list[Delta]]:
            asked.append(live_only)
            return [[fresh.pop(0) for _ in range(len(fresh))]]

        def step(number: int) -> None:
            fresh.append(tokens[number])
            outbox.live_tokens_wait()

        running = asyncio.create_task(outbox.run(due, lambda: False))
        step(0)
        await sent(queue, 1)
        queue.open.clear()
        queue.began.clear()
        step(1)
        await asyncio.to_thread(queue.began.wait)
        outbox.finish(finished(of_batch[0]))
        step(2)
        step(3)
        outbox.finish(finished(live))
        queue.open.set()
        await sent(queue, 4)
        outbox.finish(finished(of_batch[1]))
        step(4)
        await sent(queue, 5)
        assert len(queue.committed) == 1
        await outbox.deliver([])
        running.cancel()
        outbox.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sum(queue.published) == 5
    assert queue.published[:3] == [1, 1, 2]
    assert asked[1:3] == [True, True]
    assert queue.committed[0] == [str(live.key)]
    assert queue.committed[1] == [str(one.key) for one in of_batch]


def test_results_wait_for_each_other_while_more_lines_wait(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.replica.outbox.COALESCE_SECONDS", 0.0)
    monkeypatch.setattr("workers.replica.outbox.BACKLOG_SECONDS", 3600.0)
    monkeypatch.setattr("workers.replica.outbox._SHORTEST_INTERVAL", 0.0)
    queue = RecordingQueue(redis_client)
    start_batch(queue, "batch_a", 2)
    first, second = queue.claim("w1", 1, 2, models=[MODEL])

    async def run() -> None:
        outbox = Outbox(queue, "w1", 8 * 3600.0, lambda: 7, lambda held: None, lambda held: None)
        await outbox.deliver([])
        running = asyncio.create_task(outbox.run(lambda live_only: [], lambda: False))
        outbox.results_may_wait = lambda: True
        outbox.finish(finished(first))
        for _ in range(5):
            await asyncio.to_thread(redis_client.ping)
        assert queue.committed == []
        outbox.results_may_wait = lambda: False
        outbox.finish(finished(second))
        while not queue.committed:
            await asyncio.sleep(0.001)
        running.cancel()
        outbox.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert queue.committed == [[str(first.key), str(second.key)]]


async def sent(queue: RecordingQueue, tokens: int) -> None:
    while sum(queue.published) < tokens:
        await asyncio.sleep(0.001)
