"""One live call in the queue: submitted, followed and, when its client leaves, cancelled."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator

import redis

from api.chunks import Chunks
from api.fleet import Fleet
from api.http.errors import answer_to
from api.http.event_stream import EventStream, event
from api.inbox import Inbox
from api.reader import Reader
from api.state import ApiState
from api.tasks import start
from api.threads import LIVE, SUBMISSIONS, run_in
from api.token_events import patiently
from api.tracing import TRACE
from jobs.protocol import requests
from jobs.protocol.pooling_endpoint import PoolingCall
from jobs.protocol.requests import RequestKey, StreamEntry
from jobs.protocol.results import ApiError, Result
from jobs.protocol.tokenization import TokenizerCall
from jobs.protocol.validation import Call
from jobs.queue.limits import TooManyCalls
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueFull, QueueUnavailable

_WORKER_CHECK_SECONDS = 5.0
_SILENCE_SECONDS = 2.0
_BEYOND_RETRIES = 1.0  # seconds for the last try to say why it failed

logger = logging.getLogger(__name__)


class LiveCall:
    """Submit one call, follow its entries and cancel it if its client leaves."""

    def __init__(
        self, state: ApiState, call: Call | PoolingCall | TokenizerCall, tenant: str = "", key_id: str = ""
    ) -> None:
        self.key = RequestKey(requests.new_live_id(tenant), 0)
        self.calls_of_tenant = 0  # unfinished calls of the tenant, this one included; 0 if they are not counted
        self._state = state
        self._queue: Queue = state.queue
        self._reader: Reader = state.reader
        self._fleet: Fleet = state.fleet
        self._call = call
        self._key_id = key_id
        self._inbox: Inbox | None = None
        self._submitting: asyncio.Future[None] | None = None
        self._finished = False
        self._streaming = False
        self._stream: EventStream | None = None
        self._created = time.time()

    async def submit(self, raw: bytes) -> None:
        """Submit the call, to be answered to this process; `close` ends it, even if this fails.

        Raise `QueueUnavailable`, at once if Redis is full, and `TooManyCalls`.
        """
        self._inbox = self._reader.open(self.key)
        trace, trace_state = TRACE.get()
        self._request = requests.Request(
            self._call.endpoint.url,
            self._call.model,
            raw,
            secrets.randbits(63),
            created=self._created,
            reply_to=self._reader.api_id,
            trace=trace,
            trace_state=trace_state,
        )
        try:
            await self._submit()
        except TooManyCalls:  # there is nothing to cancel
            self._inbox = None
            raise

    async def first(self) -> StreamEntry:
        """Return the worker's first entry.

        Raise `ApiError` if no worker is left, or if the model was not loaded in time.
        """
        time, pause = asyncio.get_running_loop().time, min(_WORKER_CHECK_SECONDS, self._fleet.load_timeout)
        began = time()
        while True:
            try:
                async with asyncio.timeout(pause):
                    return await self._next()
            except TimeoutError:
                await self._fleet.require(self._call.model, fresh=True, waited=time() - began)

    async def result(self, entry: StreamEntry) -> Result:
        """Wait for the end of the call and return its result; `entry` is the last one read."""
        while entry.result is None:
            entry = await self._next()
        return entry.result

    async def events(self, entry: StreamEntry) -> AsyncIterator[bytes]:
        """Yield the events of a streamed call in OpenAI's form, beginning with `entry`."""
        assert isinstance(self._call, Call)
        self._streaming = True
        chunks = Chunks(self._call, int(self._created), entry.system_fingerprint)
        if openings := chunks.openings():
            yield b"".join(map(event, openings))
        if self._stream is not None and self._inbox is not None:
            self._inbox.outlet = _StreamOutlet(self._stream, chunks)
        try:
            while True:
                if events := chunks.events([entry, *self._others()]):
                    yield events
                if self._finished:
                    break
                entry = await self._next()
        except ApiError as error:
            yield event(error.body())
        except (QueueUnavailable, redis.RedisError) as error:
            logger.warning("queue unavailable; ending a stream early: %s", error)
            yield event(answer_to(error).body())
        yield event(None)

    def write_through(self, stream: EventStream) -> None:
        """Let entries be written at once to `stream`, which sends `events`, while its task waits.

        The task is then not woken for each token.
        """
        self._stream = stream

    async def close(self) -> None:
        """End the call: a worker that still runs it gets an order to stop.

        Waits until the submission is over.
        """
        self._reader.close(self.key, unneeded=self._finished and not self._call.stream)
        if self._inbox is not None and not self._finished:
            self._finished = True
            with contextlib.suppress(Exception):
                await asyncio.shield(self._cancel())

    async def _cancel(self) -> None:
        if self._submitting is not None:
            await asyncio.gather(self._submitting, return_exceptions=True)
        try:
            await run_in(LIVE, self._queue.cancel, [self.key])
        except (QueueUnavailable, redis.RedisError):
            self._reader.cancel_later(self.key)

    async def _submit(self) -> None:
        """Submit the call in a thread, which may finish after the caller has left."""
        if self._submitting is None or self._submitting.done():
            submission = patiently(self._state, lambda: run_in(SUBMISSIONS, self._submit_now), (QueueFull,))
            self._submitting = start(submission)  # an answer may have come before it fails
        timeout = self._queue.settings.redis_retry_seconds + _BEYOND_RETRIES
        if not (await asyncio.wait({self._submitting}, timeout=timeout))[0]:
            raise QueueUnavailable(f"the call could not be submitted for {timeout:g} s")
        await self._submitting

    def _submit_now(self) -> None:
        if not self._finished:
            counted = self._fleet.short_retry_queue.submit(self.key.batch, self._request, self._key_id)
            self.calls_of_tenant = counted or self.calls_of_tenant

    async def _next(self) -> StreamEntry:
        assert self._inbox is not None
        while (entry := await self._inbox.get(_SILENCE_SECONDS)) is None:
            await self._ask_after(self._inbox)
        self._finished = self._finished or entry.result is not None
        return entry

    def _others(self) -> list[StreamEntry]:
        """Return the entries that arrived together with the last one."""
        entries = [] if self._inbox is None else self._inbox.get_others()
        self._finished = self._finished or any(entry.result is not None for entry in entries)
        return entries

    async def _ask_after(self, inbox: Inbox) -> None:
        """Submit the call again if Redis came back empty; repeated tokens are not shown twice.

        Raise `TooManyCalls`, but not in a stream that has begun, which waits for room.
        """
        try:
            if await self._state.knows(self.key):
                inbox.look()
            else:
                await self._submit()
        except TooManyCalls:
            if not self._streaming:
                raise
        except (redis.RedisError, OSError, QueueUnavailable):
            pass  # the reader handles a Redis that stays unavailable


class _StreamOutlet:
    """Write events directly, past the task that waits for entries in `LiveCall.events`."""

    def __init__(self, stream: EventStream, chunks: Chunks) -> None:
        self._stream = stream
        self.show = chunks.events
        self.write = stream.write_now

    @property
    def writable(self) -> bool:
        return self._stream.writable
