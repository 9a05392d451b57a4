"""`/v1/completions` and `/v1/chat/completions`: a call goes into the queue, a worker answers
through Redis.

The HTTP status waits for the worker's first word, since only the worker knows the prompt's length.
A client that leaves cancels its call.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import redis
from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import Completion
from openai.types.chat import ChatCompletion
from starlette.requests import ClientDisconnect

from api.auth import caller_of
from api.fleet import Fleet
from api.http.errors import answer_to
from api.http.event_stream import EventStream, event, until_gone
from api.http.openapi import EVENTS, json_body
from api.http.request_body import read_body
from api.reader import Inbox, Reader
from api.state import ApiState, state_of
from api.threads import LIVE, SUBMISSIONS, run_in
from api.token_events import patiently
from jobs.protocol import requests
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import AnswerHead, ChoiceEnd
from jobs.protocol.logprobs import TextOffsets
from jobs.protocol.requests import RequestKey, StreamEntry, TokenChunk
from jobs.protocol.results import ApiError, Result, Usage
from jobs.protocol.validation import Call, decode_body, parse_call
from jobs.queue.limits import ModelOverloaded, TooManyCalls
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueFull, QueueUnavailable

_WORKER_CHECK_SECONDS = 5.0
_LARGE_BODY = 256 * 1024  # bytes; reading it would keep other calls waiting
_SILENCE_SECONDS = 2.0
_BEYOND_RETRIES = 1.0  # seconds for the last try to say why it failed
_LEAVING_SECONDS = 1.0
_leaving: set[asyncio.Future[None]] = set()  # calls that end behind their answer
_RETRY_SECONDS = "5"  # after which a refused client may try again

logger = logging.getLogger(__name__)
router = APIRouter()


@router.post(
    COMPLETIONS,
    responses={200: {"model": Completion, "content": EVENTS}},
    openapi_extra=json_body({"type": "object"}),
)
async def completions(request: Request) -> Response:
    """Continue a prompt."""
    return await answer(request, COMPLETIONS)


@router.post(
    CHAT,
    responses={200: {"model": ChatCompletion, "content": EVENTS}},
    openapi_extra=json_body({"type": "object"}),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, CHAT)


async def answer(request: Request, endpoint: str) -> Response:
    """The response of either endpoint, plain or as an event stream. Raises `ApiError`."""
    state = state_of(request)
    raw = await read_body(request, state.settings.max_body_bytes)
    call = _parse(endpoint, raw) if len(raw) < _LARGE_BODY else await run_in(LIVE, _parse, endpoint, raw)
    await state.fleet.require(call.model)
    live = LiveCall(state, call, caller_of(request).tenant)
    try:
        await live.submit(raw)
        first = await _unless_gone(request, live.first())
        if call.stream and (first.result is None or first.result.succeeded):
            headers = {"x-request-id": request.state.request_id, "x-stream-id": live.key.batch}
            return EventStream(live.events(first), state.settings.ping_seconds, live.close, headers)
        result = await _unless_gone(request, live.result(first))
    except TooManyCalls as error:
        await _for_a_moment(live.close())
        request.state.headers = {**getattr(request.state, "headers", {}), "retry-after": _RETRY_SECONDS}
        raise _refusal(error, call.model) from None
    except BaseException:
        await _for_a_moment(live.close())
        raise
    await live.close()
    return Response(result.body, result.status, media_type="application/json")


class LiveCall:
    """One call on its way through the queue."""

    def __init__(self, state: ApiState, call: Call, tenant: str = "") -> None:
        self.key = RequestKey(requests.new_live_id(tenant), 0)
        self._state = state
        self._queue: Queue = state.queue
        self._reader: Reader = state.reader
        self._fleet: Fleet = state.fleet
        self._call = call
        self._inbox: Inbox | None = None
        self._submitting: asyncio.Task[None] | None = None
        self._finished = False
        self._streaming = False
        self._created = time.time()

    async def submit(self, raw: bytes) -> None:
        """Submit the call, to be answered to this process; `close` ends it, also where this fails.

        Raise `QueueUnavailable`, at once where Redis is full, and `TooManyCalls`.
        """
        self._inbox = self._reader.open(self.key)
        self._request = requests.Request(
            self._call.endpoint.url,
            self._call.model,
            raw,
            secrets.randbits(63),
            created=self._created,
            reply_to=self._reader.api_id,
        )
        try:
            await self._submit()
        except TooManyCalls:  # there is nothing to cancel
            self._inbox = None
            raise

    async def first(self) -> StreamEntry:
        """Return the first entry from the worker. Raise `ApiError` when no worker is left."""
        while True:
            try:
                async with asyncio.timeout(_WORKER_CHECK_SECONDS):
                    return await self._next()
            except TimeoutError:
                await self._fleet.require(self._call.model, fresh=True)

    async def result(self, entry: StreamEntry) -> Result:
        """The finished response."""
        while entry.result is None:
            entry = await self._next()
        return entry.result

    async def events(self, entry: StreamEntry) -> AsyncIterator[bytes]:
        """The server-sent events of a streamed call, as OpenAI words them, from its first entry
        on.
        """
        self._streaming = True
        chunks = Chunks(self._call, int(self._created))
        for opening in chunks.openings():
            yield event(opening)
        try:
            while True:
                for chunk in chunks.of(entry):
                    yield event(chunk)
                if entry.result is not None:
                    break
                entry = await self._next()
        except ApiError as error:
            yield event(error.body())
        except (QueueUnavailable, redis.RedisError) as error:
            logger.warning("queue unavailable; ending a stream early: %s", error)
            yield event(answer_to(error).body())
        yield event(None)

    async def close(self) -> None:
        """End the call: a worker that still runs it is ordered to stop.

        Waits until its submission is over.
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
        """Submit the call. A thread cannot be cancelled: it may still submit after the caller has
        left.
        """
        if self._submitting is None or self._submitting.done():
            submission = patiently(self._state, lambda: run_in(SUBMISSIONS, self._submit_now), (QueueFull,))
            self._submitting = asyncio.create_task(submission)
        timeout = self._queue.settings.redis_retry_seconds + _BEYOND_RETRIES
        if not (await asyncio.wait({self._submitting}, timeout=timeout))[0]:
            raise QueueUnavailable(f"the call could not be submitted for {timeout:g} s")
        await self._submitting

    def _submit_now(self) -> None:
        if not self._finished:
            self._fleet.short_retry_queue.submit(self.key.batch, self._request)

    async def _next(self) -> StreamEntry:
        assert self._inbox is not None
        getting = asyncio.ensure_future(self._inbox.get())
        try:
            while not (await asyncio.wait({getting}, timeout=_SILENCE_SECONDS))[0]:
                await self._ask_after(self._inbox)
            entry = getting.result()
        finally:
            getting.cancel()
        if entry.result is not None:
            self._finished = True
        return entry

    async def _ask_after(self, inbox: Inbox) -> None:
        """Submit the call again if Redis came back empty; the tokens that come again are not shown
        twice.

        Raise `TooManyCalls`, but not in a stream that has begun: that waits for room.
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


class Chunks:
    """Turns the entries of one call into the chunks that OpenAI's clients read."""

    def __init__(self, call: Call, created: int) -> None:
        self._call = call
        self._endpoint = call.endpoint
        self._head = AnswerHead(call.endpoint.new_id(), call.model, created)
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._usage: dict[int, Usage] = {}  # so far, by choice

    def openings(self) -> list[dict[str, Any]]:
        """Return the chunks that carry the role, one for each answer of a chat."""
        opening = self._endpoint.opening()
        if opening is None:
            return []
        return [self._with_usage(self._endpoint.chunk(self._head, index, opening)) for index in range(self._call.n)]

    def of(self, entry: StreamEntry) -> list[dict[str, Any]]:
        """The chunks for one entry: text, then at the end the reasons and, if it was asked for, the
        usage.
        """
        chunks = [self._with_usage(shown) for chunk in entry.chunks for shown in self._tokens(chunk)]
        if entry.result is not None:
            chunks += map(self._with_usage, self._ending(entry.result))
        return chunks

    def _ending(self, result: Result) -> list[dict[str, Any]]:
        body = json.loads(result.body)
        if not result.succeeded:
            return [body]
        ending = [self._ending_of(choice) for choice in body["choices"]]
        if self._call.include_usage:
            ending.append(self._endpoint.usage_chunk(self._head, result.usage))
        return ending

    def _ending_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        end = ChoiceEnd(choice["finish_reason"], choice.get("stop_reason"))
        return self._endpoint.chunk(self._head, choice["index"], self._endpoint.delta(None, ()), end)

    def _tokens(self, chunk: TokenChunk) -> list[dict[str, Any]]:
        """Add the log probabilities of its tokens; an echoed prompt's come before them."""
        self._count(chunk)
        positions = [*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())]
        offsets = self._offsets[chunk.choice]
        deltas = self._endpoint.deltas(chunk, positions, offsets, self._call.return_tokens_as_token_ids)
        with_ids = self._call.return_token_ids and (chunk.token_ids or chunk.prompt_token_ids)
        if with_ids:
            deltas = deltas or [self._endpoint.delta(None, ())]
            deltas[0]["token_ids"] = chunk.token_ids
        shown = [self._endpoint.chunk(self._head, chunk.choice, delta) for delta in deltas]
        if with_ids and chunk.prompt_token_ids is not None:
            self._endpoint.add_prompt_ids(shown[0], chunk.prompt_token_ids)
        return shown

    def _count(self, chunk: TokenChunk) -> None:
        before = self._usage.get(chunk.choice, Usage(chunk.prompt_tokens, 0, chunk.cached_tokens))
        tokens = chunk.index + len(chunk.token_ids)
        self._usage[chunk.choice] = Usage(before.prompt_tokens, tokens, before.cached_tokens)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """With include_usage every chunk but the last carries `usage: null`, or with
        continuous_usage_stats, as in vLLM, the tokens of its choice so far.
        """
        if self._call.include_usage and "error" not in chunk and "usage" not in chunk:
            usage = self._usage.get(chunk["choices"][0]["index"]) if self._call.continuous_usage_stats else None
            chunk["usage"] = None if usage is None else usage.as_openai()
        return chunk


async def _for_a_moment(closing: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of a call, which goes on behind the answer while Redis is away."""
    task = asyncio.create_task(closing)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)
    await asyncio.wait({task}, timeout=_LEAVING_SECONDS)


def _refusal(error: TooManyCalls, model: str) -> ApiError:
    if isinstance(error, ModelOverloaded):
        message = f"The model `{model}` is overloaded with other requests; try again in {_RETRY_SECONDS} s."
        return ApiError(error.status, message, "server_error", code="engine_overloaded")
    message = f"Your calls at once are as many, or as large, as they may be; try again in {_RETRY_SECONDS} s."
    return ApiError(error.status, message, "rate_limit_error", code="rate_limit_exceeded")


def _parse(endpoint: str, raw: bytes) -> Call:
    return parse_call(endpoint, decode_body(raw))


async def _unless_gone(request: Request, waiting: Any) -> Any:
    """The awaited value. Raises `ClientDisconnect` when the client leaves first."""
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for one in (task, gone):
            one.cancel()
