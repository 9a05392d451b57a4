"""The entries of one live call that workers have sent, until its answer takes them.

An inbox is bounded. A call that falls behind drops its entries and reads the request's own token
stream instead, so a slow client delays no other and misses nothing.
"""

import asyncio
import time
from collections import deque
from typing import Protocol

from api.threads import LIVE, run_in
from jobs.protocol.requests import RequestKey, StreamEntry, TokenChunk
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID, position

QUEUE_LENGTH = 256
_SHORTEST_WAIT = 0.01


class Outlet(Protocol):
    """A direct way for entries while the call's task waits, which need not be woken for each."""

    @property
    def writable(self) -> bool:
        """Return whether it takes more now."""

    def show(self, entries: list[StreamEntry]) -> bytes:
        """Return the events that a client gets for these entries."""

    def write(self, shown: bytes) -> None:
        """Send data to the client."""


class Inbox:
    """The entries of one call, read by one task with `get`.

    While the task waits, ordinary entries go straight to `outlet`, if there is one.
    """

    def __init__(self, key: RequestKey, queue: Queue) -> None:
        self.key = key
        self.outlet: Outlet | None = None
        self._queue = queue
        # (position, entry, whether it is from the request's own stream)
        self._entries: deque[tuple[tuple[int, int], StreamEntry, bool]] = deque()
        self._news = asyncio.Event()
        self._waits = False  # whether a task waits for news
        self._missed = False
        self._ended = False  # whether an entry that was put ends the call
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since = 0.0  # on the monotonic clock
        self._silent = False  # whether nothing came within the time of `get`
        self._arrived = position(FIRST_ID)  # position of the last entry put
        self._last_id = FIRST_ID  # position of the last entry got
        self._last = position(FIRST_ID)
        # Tokens and characters got of each choice, and `tokens` of its parsed deltas
        self._seen: dict[int, tuple[int, int, int]] = {}

    def put(self, entry: StreamEntry) -> None:
        """Add an entry without waiting; for the reader, which then calls `deliver`.

        After a gap, `get` goes on in the request's stream.
        """
        arrived = position(entry.entry_id)
        before = arrived[0]
        for chunk in entry.chunks:
            before -= len(chunk.token_ids)
        gap = before > self._arrived[0]
        self._arrived = max(self._arrived, arrived)
        if gap or len(self._entries) >= QUEUE_LENGTH:
            self._entries.clear()
            self._missed = True
        if not self._missed:
            self._entries.append((arrived, entry, False))
            self._ended = self._ended or entry.result is not None

    def deliver(self) -> bytes:
        """Return the data for `outlet` of the entries put, or wake the task."""
        outlet = self.outlet
        if outlet is not None and self._waits and not (self._missed or self._ended) and outlet.writable:
            try:
                shown = outlet.show(self.get_others())
            except Exception as error:  # it ends this call alone
                self.fail(error)
                return b""
            self._waits_since = time.monotonic()
            return shown
        self._news.set()
        return b""

    def read_up_to(self, entry_id: str) -> None:
        """Note an entry that is only in the request's own stream; for the reader."""
        self._arrived = max(self._arrived, position(entry_id))
        self.look()

    def fail(self, error: Exception) -> None:
        """End the call: `get` raises `error` from now on."""
        self._failure = error
        self._news.set()

    def look(self) -> None:
        """Make `get` read the request's own stream, in case this process missed an entry."""
        self._missed = True
        self._news.set()

    async def get(self, seconds: float | None = None) -> StreamEntry | None:
        """Return the next entry with something new, or None after `seconds` without news.

        `seconds` are the same in each call. Each choice goes on where it ended. Raises the error
        given to `fail`.
        """
        while True:
            if self._missed:
                await self._catch_up()
            while self._entries:
                entry = self._trim(*self._entries.popleft())
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
        """Return the entries that can be got now without waiting."""
        if self._missed:
            return []
        found = []
        while self._entries:
            entry = self._trim(*self._entries.popleft())
            if entry is not None:
                found.append(entry)
        return found

    def close(self) -> None:
        """Close the inbox: nothing is got any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def _comes(self, seconds: float | None) -> bool:
        """Wait for news; return whether some came in time. One timer serves many waits."""
        self._waits_since = time.monotonic()
        if seconds is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_silence, seconds)
        self._waits = True
        try:
            await self._news.wait()
        finally:
            self._waits = False
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

        Entries that arrive meanwhile follow, without what they repeat.
        """
        self._missed = False
        self._entries.clear()
        try:
            history = await run_in(LIVE, self._queue.read_tokens, {self.key: self._last_id})
        except BaseException:
            self._missed = True
            raise
        self._entries.extendleft((position(entry.entry_id), entry, True) for entry in reversed(history))

    def _trim(self, arrived: tuple[int, int], entry: StreamEntry, stored: bool) -> StreamEntry | None:
        """Return the entry without the parts got before, or None.

        None if all of it was got, or if tokens before it are missing, which are in the request's
        own stream.
        """
        if arrived <= self._last and entry.result is None:
            return None
        # `put` sees no gap if a server was rolled back to before an entry that came but was not got
        if not stored and any(chunk.index > self._seen.get(chunk.choice, (0,))[0] for chunk in entry.chunks):
            self._entries.clear()
            self.look()
            return None
        self._last_id, self._last = entry.entry_id, arrived
        for place, chunk in enumerate(entry.chunks):
            entry.chunks[place] = self._rest(chunk)
        return entry

    def _rest(self, chunk: TokenChunk) -> TokenChunk:
        """Return the part of a chunk that was not got before.

        A server that was rolled back may send the end of a choice again, cut differently.
        """
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
