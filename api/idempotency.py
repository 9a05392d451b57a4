"""The header `Idempotency-Key`: a repeated create gets the answer of the first one.

It follows draft-ietf-httpapi-idempotency-key-header.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.auth import caller_of
from api.http.openapi import answered
from api.http.responses import json_response
from api.state import state_of
from jobs.protocol import fields
from jobs.protocol.idempotency import HEADER
from jobs.protocol.ids import new_id
from jobs.store.idempotency import HeldKey

_MAX_KEY = 255
_REPLAYED = "Idempotent-Replayed"

PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "the same for each repetition of a request, which is answered as the first was, for 24 hours",
    "schema": {"type": "string", "minLength": 1, "maxLength": _MAX_KEY},
}
"""One of the `parameters` of a route that creates something."""

Answer = tuple[dict[str, Any], bool]
"""The body, and whether it is that of an earlier request."""


def answers(kind: Any) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route with this header."""
    described = {"description": "of an answer that an earlier request had", "schema": {"enum": ["true"]}}
    return {200: answered(kind)[200] | {"headers": {_REPLAYED: described}}}


def respond(answer: Answer) -> Response:
    """Return the response that carries an answer."""
    body, replayed = answer
    return json_response(body, headers={_REPLAYED: "true"} if replayed else None)


def key_of(request: Request) -> str | None:
    """Return the client's key, if any. Raise `ApiError` 400 for an invalid one."""
    given = request.headers.getlist(HEADER)
    if not given:
        return None
    if len(given) > 1:
        fields.fail(f"The header '{HEADER}' is given {len(given)} times; give one.", HEADER, "invalid_value")
    return fields.text(given[0].strip(), HEADER, _MAX_KEY, least=1)


def hold_key(request: Request, prefix: str) -> HeldKey | None:
    """Take the key of a call that creates ids of this prefix; return None without a key.

    For a thread. Raise `ApiError` 400 and 409.
    """
    key = key_of(request)
    return None if key is None else state_of(request).idempotency_keys.hold(caller_of(request).tenant, prefix, key)


def make_once(
    request: Request,
    prefix: str,
    body: Any,
    find: Callable[[str], dict[str, Any] | None],
    make: Callable[[str | None], dict[str, Any]],
) -> Answer:
    """Create what a JSON body asks for, once for each key.

    `find` gets the id that an earlier call began. For a thread. Raise `ApiError` 400, 409, 422.
    """
    held = hold_key(request, prefix)
    if held is None:
        return make(None), False
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    with held:
        return held.make_once(digest, new_id(prefix, held.now), find, make)
