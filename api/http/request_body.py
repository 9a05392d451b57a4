"""The bodies of requests, read as long as the client goes on sending."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import Request

from api.state import state_of
from jobs.protocol import fields
from jobs.protocol.results import ApiError

_JSON = "application/json"


async def read_body(request: Request, limit: int) -> bytes:
    """Return a JSON body of at most `limit` bytes. Raises `ApiError` 408, 413 and 415."""
    check_type(request, (_JSON,))
    body = bytearray()
    async for chunk in chunks_of(request):
        body += chunk
        if len(body) > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    return bytes(body)


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
    """Yield the body as it arrives. Raises `ApiError` 408 after too long a silence."""
    silence = state_of(request).settings.upload_silence_seconds
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(silence):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"Nothing came of the body for {silence:g} seconds.", code="upload_timeout") from None
        yield chunk
