"""Headers of responses: the headers of every response, and those of limits."""

import math
import time
from typing import Any

from fastapi import Request

_VERSION = (b"openai-version", b"2020-10-01")  # of the API, as the hosted service names it


def own_headers(state: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the headers of every response, given the state of its request.

    `openai-processing-ms` is the time until the head of the response. The head of a stream is sent
    when a worker has accepted the call.
    """
    took = b"%d" % (1000 * (time.monotonic() - state["began"]))
    return [(b"x-request-id", state["request_id"].encode()), (b"openai-processing-ms", took), _VERSION]


def note_headers(request: Request, headers: dict[str, str]) -> None:
    """Add these headers to the response, unless it has them already."""
    request.state.headers = {**getattr(request.state, "headers", {}), **headers}


def rate_limit(limit: int, left: int, reset_seconds: float) -> dict[str, str]:
    """Return OpenAI's headers on a limit of requests, all of which are left again after a time."""
    return {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(left),
        "x-ratelimit-reset-requests": openai_duration(reset_seconds),
    }


def openai_duration(seconds: float) -> str:
    """Format a time as OpenAI does: 120ms, 12s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
