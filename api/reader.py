"""One reader task per API process: everything workers say about this process' live calls, handed to
the calls that wait.

A call's queue is bounded. One that falls behind loses what came and reads the request's own token
stream instead, so a slow client delays no other and misses nothing.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from typing import Any

import redis
import redis.asyncio

from api.threads import LIVE, run_in
from jobs.protocol.requests import RequestKey, StreamEntry, TokenChunk
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import API_ALIVE, API_ALIVE_SECONDS, FIRST_ID, ApiItem, parse_api_entry, position

QUEUE_LENGTH = 256
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_TIDY_SECONDS = 1.0
_SHORTEST_WAIT = 0.01

logger = logging.getLogger(__name__)


class Inbox:
    """What came for one call. One task reads it, by `get`."""

    def __init__(self, key: RequestKey, queue: Queue) -> None:
        self.key = key
        self._queue = queue
        self._entries: deque[StreamEntry] = deque()
        self._news = asyncio.Event()
        self._missed = False
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since = 0.0  # on the monotonic clock
        self._silent = False  # nothing came for as long as `get` was to wait
        self._arrived = position(FIRST_ID)  # of the last entry that was put
        self._last_id = FIRST_ID  # the last entry that was got
        # Tokens and characters that were got of each choice, and `tokens` of its parsed deltas
        self._seen: dict[int, tuple[int, int, int]] = {}

    def put(self, entry: StreamEntry) -> None:
        """Called by the reader; never waits. After a gap, `get` goes on in the request's stream."""
        arrived = position(entry.entry_id)
        gap = arrived[0] - sum([len(chunk.token_ids) for chunk in entry.chunks]) > self._arrived[0]
        self._arrived = max(self._arrived, arrived)
        if gap or len(self._entries) >= QUEUE_LENGTH:
            self._entries.clear()
            self._missed = True
        if not self._missed:
            self._entries.append(entry)
        self._news.set()

    def read_up_to(self, entry_id: str) -> None:
        """Called by the reader for an entry that is only in the request's own stream."""
        self._arrived = max(self._arrived, position(entry_id))
        self.look()

    def fail(self, error: Exception) -> None:
        """End the call: `get` raises `error` from now on."""
        self._failure = error
        self._news.set()

    def look(self) -> None:
        """Make `get` read the request's own stream, in case this process missed an entry that is
        stored there.
        """
        self._missed = True
        self._news.set()

    async def get(self, seconds: float | None = None) -> StreamEntry | None:
        """The next entry that brings something new; each choice goes on where it ended. None when
        nothing came for so many `seconds`, the same in each call.

        Raises what `fail` was given.
        """
        while True:
            if self._missed:
                await self._catch_up()
            while self._entries:
                entry = self._trim(self._entries.popleft())
                if entry is not None:
                    return entry
            if self._missed:
                continue
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            self._silent = False
            if not await self._comes(seconds):
                return None

    def get_others(self) -> list[StreamEntry]:
        """The entries that could be got now without waiting."""
        if self._missed:
            return []
        found = [self._trim(entry) for entry in self._entries]
        self._entries.clear()
        return [entry for entry in found if entry is not None]

    def close(self) -> None:
        """Nothing is got any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def _comes(self, seconds: float | None) -> bool:
        """Wait for news; return whether some came in time. One timer serves many waits."""
        self._waits_since = time.monotonic()
        if seconds is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_silence, seconds)
        await self._news.wait()
        return not self._silent

    def _end_silence(self, seconds: float) -> None:
        left = self._waits_since + seconds - time.monotonic()
        if left > 0 or self._news.is_set():
            self._timer = asyncio.get_running_loop().call_later(max(left, _SHORTEST_WAIT), self._end_silence, seconds)
        else:
            self._timer, self._silent = None, True
            self._news.set()

    async def _catch_up(self) -> None:
        """Read on from the request's own stream.

        What arrives meanwhile follows it, and is dropped where it repeats it.
        """
        self._missed = False
        self._entries.clear()
        try:
            history = await run_in(LIVE, self._queue.read_tokens, {self.key: self._last_id})
        except BaseException:
            self._missed = True
            raise
        self._entries.extendleft(reversed(history))

    def _trim(self, entry: StreamEntry) -> StreamEntry | None:
        """The entry without what was got before; None when it came before."""
        if position(entry.entry_id) <= position(self._last_id) and entry.result is None:
            return None
        self._last_id = entry.entry_id
        entry.chunks = [self._rest(chunk) for chunk in entry.chunks]
        return entry

    def _rest(self, chunk: TokenChunk) -> TokenChunk:
        """A server that was rolled back may say the end of a choice again, and differently cut."""
        tokens, characters, parsed = self._seen.get(chunk.choice, (0, 0, -1))
        if chunk.index == tokens and chunk.text_offset == characters and chunk.parsed is None:
            self._seen[chunk.choice] = tokens + len(chunk.token_ids), characters + len(chunk.text), parsed
            return chunk
        old, known = max(0, tokens - chunk.index), max(0, characters - chunk.text_offset)
        deltas = None if chunk.parsed is None else [delta for delta in chunk.parsed if delta.tokens > parsed]
        self._seen[chunk.choice] = (
            max(tokens, chunk.index + len(chunk.token_ids)),
            max(characters, chunk.text_offset + len(chunk.text)),
            max([parsed, *(delta.tokens for delta in deltas or ())]),
        )
        if not old and not known and deltas == chunk.parsed:
            return chunk
        logprobs = None if chunk.logprobs is None else chunk.logprobs[old:]
        return TokenChunk(
            chunk.choice,
            chunk.index + old,
            chunk.token_ids[old:],
            chunk.text[known:],
            chunk.text_offset + known,
            logprobs,
            parsed=deltas,
        )


class Reader:
    """Reads the stream of this API process and hands each entry to its call.

    Now and then it removes from Redis what was read, and says that the process is alive: without
    that its calls end after a minute.
    """

    def __init__(self, client: "redis.asyncio.Redis", queue: Queue, short_retry_queue: Queue) -> None:
        """`short_retry_queue` is for what would keep the reader from reading."""
        self.api_id = f"api-{uuid.uuid4().hex[:12]}"
        self._client = client
        self._queue = queue
        self._short_retry_queue = short_retry_queue
        self._inboxes: dict[str, Inbox] = {}  # by the name of the call
        self._unneeded: list[RequestKey] = []  # calls whose streams are read, and no client can ask for
        self._uncancelled: list[RequestKey] = []  # calls whose clients left while Redis was away
        self._wanted = asyncio.Event()
        self._next_tidy = 0.0  # on the loop's clock

    @property
    def calls(self) -> int:
        """Calls that wait for something."""
        return len(self._inboxes)

    def open(self, key: RequestKey) -> Inbox:
        """An inbox for a call that is about to be submitted."""
        inbox = self._inboxes[str(key)] = Inbox(key, self._queue)
        self._wanted.set()
        return inbox

    def close(self, key: RequestKey, unneeded: bool = False) -> None:
        """Drop the inbox; what still comes for the call is ignored.

        `unneeded`: the call has ended, and no client can come back for its stream.
        """
        inbox = self._inboxes.pop(str(key), None)
        if inbox is not None:
            inbox.close()
        if unneeded:
            self._unneeded.append(key)
        self._rest()

    def cancel_later(self, key: RequestKey) -> None:
        """Cancel a call once Redis is back."""
        self._uncancelled.append(key)
        self._wanted.set()

    async def run(self) -> None:
        """Read until cancelled.

        While Redis is unavailable it retries; calls fail when that takes longer than the queue's
        timeout (`redis_retry_seconds`).
        """
        last_id, pause, away_since = FIRST_ID, _FIRST_PAUSE, 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wanted.wait()
                try:
                    last_id = await self._read(last_id)
                    pause, away_since = _FIRST_PAUSE, 0.0
                    if loop.time() >= self._next_tidy:
                        self._next_tidy = loop.time() + _TIDY_SECONDS
                        await self._tidy(last_id)
                except (redis.RedisError, OSError, QueueUnavailable) as error:
                    away_since = away_since or loop.time()
                    if loop.time() - away_since > self._queue.settings.redis_retry_seconds:
                        self._fail_all(error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._client.delete(keys.api(self.api_id))

    async def _read(self, last_id: str) -> str:
        answer: Any = await self._client.xread(
            {keys.api(self.api_id): last_id}, count=1000, block=int(_TIDY_SECONDS * 1000)
        )
        for _, entries in answer:
            for entry_id, fields in entries:
                last_id = entry_id.decode()
                for item in parse_api_entry(fields):
                    self._hand_on(item)
        return last_id

    def _hand_on(self, item: ApiItem) -> None:
        inbox = self._inboxes.get(item.name)
        entry = None if inbox is None else item.entry(inbox.key)
        if inbox is not None and entry is not None:
            inbox.put(entry)
        elif inbox is not None:
            inbox.read_up_to(item.entry_id)

    async def _tidy(self, last_id: str) -> None:
        unneeded, uncancelled = list(self._unneeded), list(self._uncancelled)
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.expire(keys.api_alive(self.api_id), API_ALIVE_SECONDS)  # also where memory is full
            pipeline.set(keys.api_alive(self.api_id), API_ALIVE, ex=API_ALIVE_SECONDS, nx=True)
            pipeline.xtrim(keys.api(self.api_id), minid=last_id, approximate=False)
            await pipeline.execute(raise_on_error=False)
        if unneeded:
            await asyncio.to_thread(self._short_retry_queue.forget_streams, unneeded)
        if uncancelled:
            await asyncio.to_thread(self._short_retry_queue.cancel, uncancelled)
        del self._unneeded[: len(unneeded)], self._uncancelled[: len(uncancelled)]
        self._rest()

    def _rest(self) -> None:
        if not (self._inboxes or self._unneeded or self._uncancelled):
            self._wanted.clear()

    def _fail_all(self, error: Exception) -> None:
        logger.warning("Redis unavailable for too long; failing %d calls: %s", self.calls, error)
        for inbox in list(self._inboxes.values()):
            inbox.fail(QueueUnavailable(str(error)))
