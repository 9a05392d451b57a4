"""What a call receives from its worker: each choice in order and once, however much the stream of
its API process lost or repeats.
"""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import redis

from api.inbox import QUEUE_LENGTH, Inbox
from api.reader import Reader
from jobs.protocol.requests import Claim, Delta, ParsedDelta, RequestKey, StreamEntry, TokenChunk
from jobs.queue import keys
from jobs.queue.connection import connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID
from tests.support.requests import MODEL, finished, read_api, request, text_in, token_ids_in
from tests.support.sentinels import START_SECONDS, SentinelSet, running_sentinels

API = "api1"


@pytest.fixture
def claim(queue: Queue) -> Claim:
    queue.submit("live_a", request(reply_to=API))
    [claim] = queue.claim("w1", 1, 1, models=[MODEL])
    return claim


def publish(queue: Queue, claim: Claim, count: int) -> None:
    """`count` entries of one token for each of two choices; a token's text is its number."""
    for number in range(count):
        text = f"{number % 10}"
        chunks = [TokenChunk(choice, number, [number], text, number) for choice in range(2)]
        assert queue.publish("w1", [Delta(claim.key, claim.fence, 2 * number + 2, chunks, API)]) == []
    assert queue.commit("w1", [finished(claim)]) == []


def arrived(queue: Queue) -> list[StreamEntry]:
    return [entry for _, entry in read_api(queue, API)]


def receive(queue: Queue, key: RequestKey, entries: list[StreamEntry]) -> list[StreamEntry]:
    """What a reader gets that is behind by all of them, up to the result."""

    async def read() -> list[StreamEntry]:
        inbox = Inbox(key, queue)
        for entry in entries:
            inbox.put(entry)
        received = [await asyncio.wait_for(inbox.get(), 60)]
        while received[-1].result is None:
            received.append(await asyncio.wait_for(inbox.get(), 60))
        return received

    return asyncio.run(read())


def check(received: list[StreamEntry], tokens: int) -> None:
    for choice in range(2):
        assert [token_id for entry in received for token_id in token_ids_in(entry, choice)] == list(range(tokens))
        assert "".join(text_in(entry, choice) for entry in received) == "".join(
            f"{number % 10}" for number in range(tokens)
        )


@pytest.mark.parametrize("missing", [slice(0, 0), slice(0, 3), slice(2, 4), slice(4, 6), slice(5, 6)])
def test_what_the_stream_lost_comes_from_the_requests_own(queue: Queue, claim: Claim, missing: slice) -> None:
    publish(queue, claim, 6)
    entries = arrived(queue)
    del entries[missing]
    check(receive(queue, claim.key, entries), 6)


def test_a_slow_reader_misses_nothing(queue: Queue, claim: Claim) -> None:
    publish(queue, claim, QUEUE_LENGTH + 20)
    check(receive(queue, claim.key, arrived(queue)), QUEUE_LENGTH + 20)


def test_what_comes_again_is_dropped(queue: Queue, claim: Claim) -> None:
    publish(queue, claim, 5)
    entries = arrived(queue)
    received = receive(queue, claim.key, [*entries[:3], *entries[1:4], *entries[2:]])
    check(received, 5)
    assert len(received) == len(entries)


def test_a_server_that_was_rolled_back_says_the_end_again_and_differently_cut(queue: Queue, claim: Claim) -> None:
    publish(queue, claim, 4)
    *entries, last = arrived(queue)
    chunks = [TokenChunk(choice, 2, [2, 3, 4, 5], "2345", 2) for choice in range(2)]
    again = [StreamEntry(claim.key, "12-0", chunks), StreamEntry(claim.key, "12-2", [], result=last.result)]
    check(receive(queue, claim.key, [*entries, *again]), 6)


def test_what_a_rolled_back_server_generates_again_has_no_hole(queue: Queue, claim: Claim) -> None:
    """An entry came that the server then lost, and with it what would have filled the gap before;
    of what comes in their place the first entries are missed too.
    """

    async def read() -> list[StreamEntry]:
        publish(queue, claim, 6)
        entries = arrived(queue)
        stored = queue.redis.dump(keys.tokens(str(claim.key)))
        queue.redis.xtrim(keys.tokens(str(claim.key)), maxlen=0)
        inbox = Inbox(claim.key, queue)
        for entry in (entries[0], entries[3]):
            inbox.put(entry)
        received = []
        while (entry := await inbox.get(0.02)) is not None:
            received.append(entry)
        queue.redis.restore(keys.tokens(str(claim.key)), 0, stored, replace=True)
        for entry in entries[2:]:
            inbox.put(entry)
        while not received or received[-1].result is None:
            entry = await inbox.get()
            received += [] if entry is None else [entry]
        return received

    check(asyncio.run(asyncio.wait_for(read(), 60)), 6)


def test_parsed_deltas_are_got_once_however_they_come_again(queue: Queue, claim: Claim) -> None:
    """Each says of which token it is; what a parser held at the end counts as one token more."""
    said = [ParsedDelta(1, "a"), ParsedDelta(3, "", "b"), ParsedDelta(4, "c"), ParsedDelta(5, "d")]

    def entry(entry_id: str, index: int, tokens: int, *deltas: ParsedDelta, end: bool = False) -> StreamEntry:
        chunk = TokenChunk(0, index, [7] * tokens, "", 0, parsed=list(deltas))
        return StreamEntry(claim.key, entry_id, [chunk], result=finished(claim).result if end else None)

    entries = [
        entry("2-0", 0, 2, said[0]),
        entry("4-0", 2, 2, *said[1:3]),
        entry("7-0", 1, 3, said[1], said[2]),
        entry("7-1", 4, 0, said[3]),
        entry("8-0", 3, 1, said[2], said[3], end=True),
    ]
    received = receive(queue, claim.key, entries)
    assert len(received) == len(entries)
    assert [delta for one in received for chunk in one.chunks for delta in chunk.parsed or ()] == said
    assert [token for one in received for token in token_ids_in(one)] == [7] * 4


def test_a_call_that_ends_with_less_than_was_seen_still_ends(queue: Queue, claim: Claim) -> None:
    """Its last tokens were lost with the server's last second, and then its last worker was."""
    publish(queue, claim, 4)
    *entries, last = arrived(queue)
    received = receive(queue, claim.key, [*entries, StreamEntry(claim.key, "4-2", [], result=last.result)])
    check(received, 4)
    assert received[-1].result is not None


def test_silence_ends_a_wait_and_not_the_call(queue: Queue, claim: Claim) -> None:
    async def read() -> list[StreamEntry | None]:
        inbox = Inbox(claim.key, queue)
        silent = [await inbox.get(0.02), await inbox.get(0.02)]
        for number in range(3):
            inbox.put(StreamEntry(claim.key, f"{number + 1}-0", [TokenChunk(0, number, [number], "x", number)]))
        found = [await inbox.get(0.02), *inbox.get_others()]
        return [*silent, *found, await inbox.get(0.02)]

    received = asyncio.run(asyncio.wait_for(read(), 60))
    assert [one and one.entry_id for one in received] == [None, None, "1-0", "2-0", "3-0", None]


@pytest.mark.proof
def test_a_reader_finds_the_new_server_after_a_failover() -> None:
    """Its connection, which it keeps, was to the old one."""

    async def over_a_failover(sentinels: SentinelSet, queue: Queue) -> list[Any]:
        client = connect_async(sentinels.url)
        reader = Reader(client, queue, queue)
        assert await reader._entries_after(FIRST_ID) == []
        await asyncio.to_thread(sentinels.fail_over)
        await asyncio.to_thread(queue.redis.xadd, keys.api(reader.api_id), {"k": "v"})
        while True:
            with suppress(redis.RedisError, OSError):
                return await reader._entries_after(FIRST_ID)
            await asyncio.sleep(0.05)

    with running_sentinels() as sentinels, connect(sentinels.url) as client:
        queue = Queue(client, QueueSettings(redis_retry_seconds=START_SECONDS))
        [(_, fields)] = asyncio.run(asyncio.wait_for(over_a_failover(sentinels, queue), START_SECONDS))
    assert fields == [b"k", b"v"]
