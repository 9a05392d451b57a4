"""Headers of every response: `x-request-id`, its time, and headers that a route has noted."""

import re
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.answer_headers import own_headers
from jobs.protocol.results import new_request_id

_GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")


class RequestIds:
    """Add the headers, as plain ASGI middleware: streams and disconnects pass through untouched.

    A client may choose the id of its request; one that logs or headers could not hold is replaced.
    `request.state.headers` may hold more headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["began"] = time.monotonic()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                noted = [(name.encode(), value.encode()) for name, value in scope["state"].get("headers", {}).items()]
                known = {name for name, _ in message["headers"]} if noted else ()
                more = (one for one in noted if one[0] not in known)
                message["headers"] = [*message["headers"], *own_headers(scope["state"]), *more]
            await send(message)

        await self._app(scope, receive, send_named)


def _given(scope: Scope) -> str | None:
    """Return the client's id, None unless there is exactly one usable."""
    found = Headers(scope=scope).getlist("x-request-id")
    return found[0] if len(found) == 1 and _GIVEN.fullmatch(found[0]) else None
