"""Authorization: the key of `Authorization: Bearer`, and what its tenant may see and do."""

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.http.answer_headers import note_headers, openai_duration, rate_limit
from api.http.held_shares import take_call
from api.settings import ApiSettings
from api.state import queue_reachable, state_of
from api.threads import KEYS, LIVE, run_in
from jobs.protocol.results import ApiError
from jobs.queue.limits import Admission
from jobs.store.api_keys import KeyRecord, KnownKeys

_NO_KEY = "No API key was given: send it as a header, 'Authorization: Bearer YOUR_KEY'."
_WRONG_KEY = "The API key that was given is not valid here."
_BEARER = HTTPBearer(auto_error=False)

ANSWERS: dict[int | str, dict[str, Any]] = {
    401: {"description": "No key, or one that is not valid."},
    403: {"description": "No key exists, and a web page may be calling: a foreign Host or Origin."},
    429: {"description": "More requests in a minute than the key allows, or more at once than there may be."},
    503: {"description": "The keys or the queue cannot be read at the moment."},
}
"""The answers of `authorize` in place of a route."""


@dataclass(frozen=True)
class Caller:
    """The tenant and the limits of a request's key.

    The tenant "" is that of a server without keys; a limit of None is no limit.
    """

    tenant: str = ""
    key_id: str | None = None
    requests_per_minute: int | None = None
    queued_tokens: int | None = None
    open_batches: int | None = None


async def authorize(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]
) -> Caller:
    """Authorize a request of a route below /v1; `caller_of` then returns its caller.

    Raises `ApiError`, 401 or 429, `KeysUnreadable` and `QueueUnavailable`.
    """
    state = state_of(request)
    secret = "" if bearer is None else bearer.credentials
    found = await run_in(KEYS, state.keys.look) if state.keys.due else state.keys.latest
    caller = _caller(found, state.settings, secret)
    request.state.caller = caller
    if caller.key_id is not None:
        take_call(request, state.calls, caller.key_id)
    if caller.key_id is not None and caller.requests_per_minute is not None:
        await queue_reachable(request)
        admitting = run_in(LIVE, state.queue.admit, caller.key_id, caller.requests_per_minute)
        admission = await state.fleet.unless_away(admitting)
        note_headers(request, _rate_headers(admission, caller.requests_per_minute))
        if not admission.admitted:
            raise ApiError(
                429, f"The key's limit of {caller.requests_per_minute} requests per minute is reached; try again in "
                f"{openai_duration(admission.wait_seconds)}.", "rate_limit_error", code="rate_limit_exceeded",
            )  # fmt: skip
    return caller


class AuthorizedRoute(APIRoute):
    """A route behind `authorize` alone, whose function takes the request and returns the response.

    The framework need not resolve parameters and dependencies for each call.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""

        async def handle(request: Request) -> Response:
            await authorize(request, await _BEARER(request))
            return cast(Response, await self.endpoint(request))

        return handle


def caller_of(request: Request) -> Caller:
    """Return the caller that `authorize` let in."""
    return cast(Caller, request.state.caller)


def needs_no_key(found: KnownKeys, settings: ApiSettings) -> bool:
    """Return whether every client is let in."""
    return not found.are_required and (settings.insecure or (settings.is_local and not found.exist))


def _caller(found: KnownKeys, settings: ApiSettings, secret: str) -> Caller:
    """Return the caller of a request. Raise `ApiError` for a missing or wrong key."""
    if needs_no_key(found, settings):
        return Caller()
    if not secret:
        raise ApiError(401, _NO_KEY, code="invalid_api_key")
    record = found.find(secret)
    if record is None:
        raise ApiError(401, _WRONG_KEY, code="invalid_api_key")
    return _as_caller(record)


def _rate_headers(admission: Admission, limit: int) -> dict[str, str]:
    """Return OpenAI's headers on the limit per minute, with `retry-after` for a refused request."""
    headers = rate_limit(limit, admission.left, admission.full_seconds)
    if not admission.admitted:
        headers |= {
            "retry-after": str(math.ceil(admission.wait_seconds)),
            "retry-after-ms": str(math.ceil(1000 * admission.wait_seconds)),
        }
    return headers


def _as_caller(record: KeyRecord) -> Caller:
    return Caller(record.tenant, record.id, record.requests_per_minute, record.queued_tokens, record.open_batches)
