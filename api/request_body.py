"""The body of a request that is read as a whole."""

from fastapi import Request

from jobs.results import ApiError


async def read_body(request: Request, limit: int) -> bytes:
    """At most `limit` bytes. Raises `ApiError` 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    return bytes(body)
