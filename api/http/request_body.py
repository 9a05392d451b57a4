"""The bodies of requests, read as long as the client goes on sending."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import Request

from api.http.held_shares import BodyMemory
from api.state import state_of
from jobs.protocol import fields
from jobs.protocol.results import ApiError

_JSON = "application/json"
_LEAST_RATE = 1024  # bytes a second, after a first silence


async def read_body(request: Request, limit: int) -> bytes:
    """Return a JSON body of at most `limit` bytes, whose memory is held until the request ends.

    Raises `ApiError` 408, 413, 415, 429 and 503.
    """
    check_type(request, (_JSON,))
    memory = body_memory(request)
    size, body = announced(request), bytearray()
    if size <= limit:
        memory.take(size)
    async for chunk in chunks_of(request):
        body += chunk
        if max(len(body), size) > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
        if len(body) > memory.bytes:
            memory.take(len(body) - memory.bytes)
    return bytes(body)


def body_memory(request: Request) -> BodyMemory:
    """Return the memory for the body, of the key's or the address' share."""
    client = "" if request.client is None else request.client.host
    return BodyMemory(request, state_of(request).bodies, request.state.caller.key_id or client)


def announced(request: Request) -> int:
    """Return the bytes of the body by its Content-Length, 0 without one."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def check_type(request: Request, types: Sequence[str]) -> None:
    """Refuse a content type that web pages may send to any server, if no key was needed.

    `types` are allowed, the usual one first. Raise `ApiError` 415.
    """
    given = request.headers.get("content-type") or types[0]
    if given.partition(";")[0].strip().lower() not in types and request.state.caller.key_id is None:
        what = "JSON" if types[0] == _JSON else "JSONL"
        message = f"Send {what} with the header 'Content-Type: {types[0]}', not '{fields.shown(given)}'."
        raise ApiError(415, message, code="not_json")


async def chunks_of(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises `ApiError` 408 after too long a silence, or if it comes
    too slowly.
    """
    silence = state_of(request).settings.upload_silence_seconds
    stream, loop = request.stream(), asyncio.get_running_loop()
    left = silence  # seconds to wait for the client
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(min(silence, left)):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            slow = f"The body came with less than {_LEAST_RATE} bytes a second."
            message = slow if left < silence else f"Nothing came of the body for {silence:g} seconds."
            raise ApiError(408, message, code="upload_timeout") from None
        left += len(chunk) / _LEAST_RATE - (loop.time() - began)
        yield chunk
