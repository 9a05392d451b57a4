"""The client, errors and objects of the package `openai`.

The package is imported at its first use: the import takes half a second of CPU time, which a
private server needs for its start.
"""

import asyncio
import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import httpx2
    import openai
    from openai.types import Batch

_CLASSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


def official_client(http: "httpx2.AsyncClient", base_url: str, api_key: str) -> "openai.AsyncOpenAI":
    """Return an official client that sends its calls through `http`."""
    import openai

    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


async def official_batch(body: bytes) -> "Batch":
    """Return the Batch object of an answer."""
    openai = await _imported()
    return openai.types.Batch.construct(**msgspec.json.decode(body))  # type: ignore[no-any-return]


async def status_error(response: "httpx2.Response") -> "openai.APIStatusError":
    """Return the error that the official client raises for an answer, whose body was read."""
    openai = await _imported()
    body: Any = response.text.strip()
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        body = msgspec.json.decode(response.content)
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message") if isinstance(error, dict) else None
    other = "InternalServerError" if response.status_code >= 500 else "APIStatusError"
    kind = getattr(openai, _CLASSES.get(response.status_code, other))
    text = f"Error code: {response.status_code}{f' - {said}' if said else ''}"
    return kind(text, response=response, body=error)  # type: ignore[no-any-return]


async def connection_error(error: "httpx2.RequestError", timed_out: bool) -> "openai.APIConnectionError":
    """Return the error that the official client raises for a call without an answer."""
    openai = await _imported()
    kind = openai.APITimeoutError if timed_out else openai.APIConnectionError
    return kind(request=error.request)  # type: ignore[no-any-return]


async def _imported() -> Any:
    """Import the package in a thread, since the import would block the event loop."""
    return await asyncio.to_thread(import_module, "openai")
