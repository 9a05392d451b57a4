"""`GET /v1/streams/{id}`: the tokens of a request, as server-sent events.

They come from its beginning or after `Last-Event-ID`. The id of an event counts the output tokens
up to it, so a reader that was cut goes on without gap or repetition, on any API process.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.auth import caller_of
from api.http.event_stream import EventStream, event
from api.http.openapi import EVENTS
from api.state import ApiState, state_of
from api.threads import LIVE, run_in
from api.token_events import LAST_EVENT_ID, last_event_id, next_entries, patiently, to_the_end
from jobs.protocol import fields
from jobs.protocol.requests import LIVE_PREFIX, RequestKey, StreamEntry
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.following import Watch
from jobs.queue.streams import FIRST_ID, parse_entry

router = APIRouter()


@router.get(
    "/v1/streams/{name:path}",
    responses={200: {"content": EVENTS}},
    response_class=Response,
    openapi_extra={"parameters": [LAST_EVENT_ID]},
)
async def stream(request: Request, name: str) -> Response:
    """Stream the tokens of a request as they come.

    Events are `{"id", "choices": [{"index", "token_offset", "token_ids", "text", "text_offset"}]}`,
    the last one also with `status` and `response`; then comes `[DONE]`. If `best_of` is larger than
    `n`, all choices are shown. Log probabilities are in the response. `name` is a request of a
    batch (`batch_x/17`) or a live call (`live_x`). A request of another tenant is unknown.
    """
    state = state_of(request)
    key = _parse_key(name)
    after = last_event_id(request) or FIRST_ID
    if not await state.fleet.unless_away(_is_readable(state, caller_of(request).tenant, key)):
        message = f"No request {fields.shown(name)} is running, and no stream of it is kept."
        raise ApiError(404, message, "not_found_error", code="stream_not_found")
    return EventStream(to_the_end(_events(state, key, after), state.followers), state.settings.ping_seconds)


async def _is_readable(state: ApiState, tenant: str, key: RequestKey) -> bool:
    return await state.is_of(tenant, key) and await state.knows(key)


async def _events(state: ApiState, key: RequestKey, after: str) -> AsyncIterator[bytes]:
    """Yield events until the request's end.

    An unwatched request loses its stream when it ends; the events end then too.
    """
    watch = Watch(state.fleet.short_retry_queue, key, state.settings.watch_seconds)
    while True:
        if watch.due:
            await patiently(state, lambda: run_in(LIVE, watch.begin))
        entries = [parse_entry(key, *found) for found in await next_entries(state, keys.tokens(str(key)), after, 1000)]
        for entry in entries:
            after = entry.entry_id
            yield event(_as_json(entry), entry.entry_id)
        if (entries and entries[-1].result is not None) or (
            not entries and not await patiently(state, lambda: state.knows(key))
        ):
            break


def _as_json(entry: StreamEntry) -> dict[str, Any]:
    choices = [chunk.event() | {"token_ids": chunk.token_ids} for chunk in entry.chunks]
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
        raise ApiError(
            404, f"Not the name of a request: {fields.shown(name)}", "not_found_error", code="stream_not_found"
        ) from None
