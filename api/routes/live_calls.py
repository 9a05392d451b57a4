"""`/v1/completions` and `/v1/chat/completions`: calls that a worker answers through Redis.

The HTTP status waits for the worker's first entry, since only the worker knows the prompt's length.
A client that leaves cancels its call.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from api.answer_objects import ChatCompletion, Completion
from api.auth import AuthorizedRoute, caller_of
from api.http.answer_headers import note_headers, rate_limit
from api.http.event_stream import EventStream, until_gone
from api.http.openapi import EVENTS, answered, json_body
from api.http.request_body import read_body
from api.live_call import LiveCall
from api.state import state_of
from api.tasks import start
from api.threads import LIVE, run_in
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.pooling_endpoint import PoolingCall
from jobs.protocol.results import ApiError
from jobs.protocol.tokenization import TokenizerCall
from jobs.protocol.validation import Call, decode_body, parse_call
from jobs.queue.limits import ModelOverloaded, TooManyCalls

_LARGE_BODY = 256 * 1024  # bytes; parsing more on the event loop would delay other calls
_LEAVING_SECONDS = 1.0
_leaving: set[asyncio.Future[None]] = set()  # calls that end after their response
_RETRY_SECONDS = "5"  # before a refused client tries again

router = APIRouter(route_class=AuthorizedRoute)


@router.post(
    COMPLETIONS,
    responses=answered(Completion, **EVENTS),
    openapi_extra=json_body({"type": "object"}),
)
async def completions(request: Request) -> Response:
    """Continue a prompt."""
    return await answer(request, partial(_parse, COMPLETIONS))


@router.post(
    CHAT,
    responses=answered(ChatCompletion, **EVENTS),
    openapi_extra=json_body({"type": "object"}),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, partial(_parse, CHAT))


async def answer(request: Request, parse: Callable[[bytes], Call | PoolingCall | TokenizerCall]) -> Response:
    """Return the response to a live call, plain or as an event stream; `parse` reads its body.

    Raise `ApiError`.
    """
    state = state_of(request)
    raw = await read_body(request, state.settings.max_body_bytes)
    call = parse(raw) if len(raw) < _LARGE_BODY else await run_in(LIVE, parse, raw)
    await state.fleet.require(call.model, endpoint=call.endpoint)
    caller = caller_of(request)
    live = LiveCall(state, call, caller.tenant, caller.key_id or "")
    request.state.stream_id = live.key.batch  # workers log it under this id
    try:
        await live.submit(raw)
        _note_limit(request, live.calls_of_tenant)
        first = await _unless_gone(request, live.first())
        if call.stream and (first.result is None or first.result.succeeded):
            headers = {"x-stream-id": live.key.batch}
            stream = EventStream(live.events(first), state.settings.ping_seconds, live.close, headers)
            if not state.settings.middleware:  # middleware may change what it sees
                live.write_through(stream)
            return stream
        result = first.result or await _unless_gone(request, live.result(first))
    except TooManyCalls as error:
        await _for_a_moment(live.close())
        if not isinstance(error, ModelOverloaded):
            _note_limit(request, state.queue.settings.live_calls_per_tenant)
        note_headers(request, {"retry-after": _RETRY_SECONDS})
        raise _refusal(error, call.model) from None
    except BaseException:
        await _for_a_moment(live.close())
        raise
    await live.close()
    if result.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # a repetition would fail in the same way
        note_headers(request, {"x-should-retry": "false"})
    return Response(result.body, result.status, media_type="application/json")


async def _for_a_moment(closing: Coroutine[Any, Any, None]) -> None:
    """Wait briefly for the end of a call; while Redis is away, it ends after the response."""
    task = asyncio.create_task(closing)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)
    await asyncio.wait({task}, timeout=_LEAVING_SECONDS)


def _note_limit(request: Request, calls: int) -> None:
    """Note the limit of concurrent calls of the tenant, unless its key has a limit per minute."""
    if calls and caller_of(request).requests_per_minute is None:
        limit = state_of(request).queue.settings.live_calls_per_tenant
        left = max(0, limit - calls)
        note_headers(request, rate_limit(limit, left, 0.0 if left else float(_RETRY_SECONDS)))


def _refusal(error: TooManyCalls, model: str) -> ApiError:
    if isinstance(error, ModelOverloaded):
        message = f"The model `{model}` is overloaded with other requests; try again in {_RETRY_SECONDS} s."
        return ApiError(error.status, message, "server_error", code="engine_overloaded")
    message = f"Your calls at once are as many, or as large, as they may be; try again in {_RETRY_SECONDS} s."
    return ApiError(error.status, message, "rate_limit_error", code="rate_limit_exceeded")


def _parse(endpoint: str, raw: bytes) -> Call:
    return parse_call(endpoint, decode_body(raw))


async def _unless_gone(request: Request, waiting: Any) -> Any:
    """Return the awaited value. Raises `ClientDisconnect` when the client leaves first."""
    task = start(waiting)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for one in (task, gone):
            one.cancel()
