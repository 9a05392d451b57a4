"""A log line for each answered request."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.route_path import route_path

_LEFT = 499  # of a client that left before the answer, as nginx logs it

logger = logging.getLogger(__name__)


class AccessLog:
    """Log answered requests, as plain ASGI middleware: streams and disconnects pass untouched.

    A line is written when the answer has ended. It has neither query nor body.
    """

    def __init__(self, app: ASGIApp, without: frozenset[str]) -> None:
        self._app = app
        self._without = without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in self._without:
            await self._app(scope, receive, send)
            return
        status, began = _LEFT, time.perf_counter()

        async def send_noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = 500
            raise
        finally:
            _log(scope, status, time.perf_counter() - began)


def _log(scope: Scope, status: int, seconds: float) -> None:
    host, port = scope.get("client") or ("-", 0)
    host = quote(host, safe=":")  # a proxy's header, which a client may forge
    fields = {
        "client": f"{host}:{port}" if port else host,
        "method": scope["method"],
        "path": quote(scope["path"]),  # without line breaks
        "status": status,
        "ms": round(1000 * seconds, 1),
        "request_id": scope["state"]["request_id"],
    }
    stream = scope["state"].get("stream_id")
    text = '%(client)s "%(method)s %(path)s" %(status)d in %(ms).1f ms, %(request_id)s'
    if stream is not None:
        fields["stream_id"] = stream
        text += ", %(stream_id)s"
    logger.info(text, fields, extra={"fields": fields})
