"""`GET /v1/streams/{id}`: the tokens of any request, from its beginning or after `Last-Event-ID`, as server-sent events.

The id of an event says how many output tokens came up to it: a reader that was cut goes on without gap or repetition, on any API process.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis
from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.auth import caller_of
from api.errors import queue_unavailable
from api.event_stream import EventStream, event
from api.openapi import EVENTS
from api.state import ApiState, state_of
from jobs import keys
from jobs.connection import MAX_BLOCK_SECONDS
from jobs.requests import LIVE_PREFIX, RequestKey, StreamEntry
from jobs.results import ApiError
from jobs.scripts import QueueUnavailable
from jobs.streams import FIRST_ID, parse_entry

router = APIRouter()
_EVENT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")  # what Redis takes


@router.get("/v1/streams/{name:path}", responses={200: {"content": EVENTS}}, response_class=Response)
async def stream(request: Request, name: str) -> Response:
    """Events `{"id", "choices": [{"index", "token_offset", "token_ids", "text", "text_offset"}]}`, the last one also with `status` and
    `response`, then `[DONE]`. Where `best_of` is larger than `n`, all that are generated are shown; log probabilities are in the response.

    `name` is a request of a batch (`batch_x/17`) or a live call (`live_x`). One of another tenant is as unknown as one that never was.
    """
    state = state_of(request)
    key = _parse_key(name)
    after = request.headers.get("last-event-id") or FIRST_ID
    if not _EVENT_ID.fullmatch(after):
        raise ApiError(400, f"Last-Event-ID is not the id of an event: {after}", param="Last-Event-ID", code="invalid_value")
    if not await state.is_of(caller_of(request).tenant, key) or not await state.knows(key):
        raise ApiError(404, f"No request {name} is running, and no stream of it is kept.", "not_found_error", code="stream_not_found")
    return EventStream(_events(state, key, after), state.settings.ping_seconds, _nothing)


async def _events(state: ApiState, key: RequestKey, after: str) -> AsyncIterator[bytes]:
    """Reads on until the request's end. A request that was not watched loses its stream when it ends: then so does this one."""
    watched_until = 0.0
    loop = asyncio.get_running_loop()
    try:
        while True:
            if loop.time() > watched_until:
                await asyncio.to_thread(state.queue.watch, key, state.settings.watch_seconds)
                watched_until = loop.time() + state.settings.watch_seconds / 2
            entries = await _read(state, key, after)
            for entry in entries:
                after = entry.entry_id
                yield event(_as_json(entry), entry.entry_id)
            if (entries and entries[-1].result is not None) or (not entries and not await state.knows(key)):
                break
    except (QueueUnavailable, redis.RedisError):
        yield event(queue_unavailable().body())
    yield event(None)


async def _read(state: ApiState, key: RequestKey, after: str) -> list[StreamEntry]:
    answer: Any = await state.stream_client.xread({keys.tokens(str(key)): after}, count=1000, block=int(MAX_BLOCK_SECONDS * 1000))
    return [parse_entry(key, entry_id.decode(), fields) for _, entries in answer for entry_id, fields in entries]


def _as_json(entry: StreamEntry) -> dict[str, Any]:
    choices = [
        {
            "index": chunk.choice,
            "token_offset": chunk.index,
            "token_ids": chunk.token_ids,
            "text": chunk.text,
            "text_offset": chunk.text_offset,
        }
        for chunk in entry.chunks
    ]
    value: dict[str, Any] = {"id": str(entry.key), "choices": choices}
    if entry.result is not None:
        value |= {"status": entry.result.status, "response": msgspec.json.decode(entry.result.body)}
    return value


def _parse_key(name: str) -> RequestKey:
    if name.startswith(LIVE_PREFIX) and "/" not in name:
        return RequestKey(name, 0)
    try:
        return RequestKey.parse(name)
    except ValueError:
        raise ApiError(404, f"Not the name of a request: {name}", "not_found_error", code="stream_not_found") from None


async def _nothing() -> None:
    return
