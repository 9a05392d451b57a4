"""A client may begin to read a batch at any moment: nothing is missing and nothing comes twice,
whatever workers do meanwhile.
"""

import random
import threading
from collections import Counter, defaultdict

import redis

from jobs.protocol.requests import BatchEntry, Claim, RequestKey
from jobs.queue.connection import connect
from jobs.queue.following import StreamSnapshot
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, delta, finished, start_batch

LINES = 60
TOKENS = 40


class Workers(threading.Thread):
    """Gives every request `TOKENS` tokens, many at once and in a random order, some after having
    been requeued, and ends it.

    At each fifth of its way it waits until one more reader has begun.
    """

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._random = random.Random(seed)
        self.begun = threading.Semaphore(0)

    def run(self) -> None:
        with connect(self._url) as client:
            queue, seq = Queue(client), 0
            held: list[Claim] = []
            ended = 0
            published: defaultdict[RequestKey, int] = defaultdict(int)
            while True:
                seq += 1
                held += queue.claim("w1", seq, 20 - len(held), models=[MODEL])
                if not held:
                    return
                claim = self._random.choice(held)
                done, more = published[claim.key], self._random.randint(1, 8)
                last = delta(
                    claim, done, list(range(done, min(TOKENS, done + more))), "x" * min(more, TOKENS - done), done
                )
                published[claim.key] = last.total
                if last.total == TOKENS:
                    held.remove(claim)
                    assert queue.commit("w1", [finished(claim, last=last)]) == []
                    ended += 1
                    if ended % (LINES // 5) == 0 and ended < LINES:
                        self.begun.acquire()
                else:
                    assert queue.publish("w1", [last]) == []
                    if self._random.random() < 0.05:
                        held.remove(claim)
                        assert queue.requeue("w1", [(claim.key, claim.fence)]) == []


class Reading:
    """What one reader received."""

    def __init__(self) -> None:
        self.tokens: defaultdict[RequestKey, int] = defaultdict(int)
        self.ended: set[RequestKey] = set()

    def take(self, entries: list[BatchEntry]) -> None:
        for entry in entries:
            assert entry.key is not None
            for chunk in entry.chunks:
                assert chunk.index == self.tokens[entry.key] == chunk.text_offset, (entry, self.tokens[entry.key])
                assert len(chunk.text) == len(chunk.token_ids)
                self.tokens[entry.key] += len(chunk.token_ids)
            if entry.succeeded is not None:
                assert entry.key not in self.ended, entry
                self.ended.add(entry.key)


def test_a_reader_may_begin_at_any_moment(queue: Queue, redis_client: redis.Redis, redis_url: str, seed: int) -> None:
    start_batch(queue, "batch_a", LINES)
    queue.watch("batch_a", 60)
    workers = Workers(redis_url, seed)
    workers.start()
    readers: list[tuple[Reading, str]] = []
    while workers.is_alive():
        reading = Reading()
        snapshot = StreamSnapshot(queue, "batch_a", queue.watch("batch_a", 60))
        for entries in snapshot:
            reading.take(entries)
        assert snapshot.last_id is not None
        workers.begun.release()
        readers.append((reading, snapshot.last_id))
    workers.join()
    for reading, last_id in readers:
        while entries := queue.read_batch("batch_a", last_id):
            reading.take(entries)
            last_id = entries[-1].id
        assert set(reading.tokens.values()) <= {TOKENS}
        assert reading.ended == set(reading.tokens)
    print(f"{len(readers)} readers")
    assert len(readers) > 3
    assert len(readers[0][0].tokens) > LINES // 2


def test_few_long_texts_are_in_memory_at_once(queue: Queue) -> None:
    """Many requests have come and ended since the reader began, as early lines do."""
    count, text = 200, "x" * 5000
    start_batch(queue, "batch_a", count)
    first_id = queue.watch("batch_a", 60)
    claims = queue.claim("w1", 1, count, models=[MODEL])
    queue.publish("w1", [delta(claim, 0, [1], text) for claim in claims])
    queue.commit("w1", [finished(claim, last=delta(claim, 1, [2], text, len(text))) for claim in claims])
    groups = [*StreamSnapshot(queue, "batch_a", first_id)]
    shown = Counter(entry.key for group in groups for entry in group for chunk in entry.chunks if chunk.text == text)
    assert shown == {claim.key: 2 for claim in claims}
    assert max(len(group) for group in groups) <= 16
