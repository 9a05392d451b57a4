"""A span for each call of the API, and its context for the requests that the call submits."""

from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.route_path import route_path
from api.http_settings import PROBED
from jobs.tracing import Tracing, mark_failed

TRACE: ContextVar[tuple[str | None, str | None]] = ContextVar("trace", default=(None, None))
"""`traceparent` and `tracestate` of the call that is being answered."""

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class Traced:
    """Trace each call, as plain ASGI middleware: streams and disconnects pass through untouched.

    A span lasts until the last byte of the answer was sent. It has nothing of a body, a query or a
    key.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in PROBED:  # frequent probes would bury the other spans
            await self._app(scope, receive, send)
            return
        span = self._tracing.start("HTTP", "SERVER", *_context_of(Headers(scope=scope)))
        token = TRACE.set(self._tracing.context_of(span))
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "x-request-id" in (headers := Headers(raw=message["headers"])):
                    span.set_attribute("http.response.header.x-request-id", [headers["x-request-id"]])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            status = status or 500
            mark_failed(span, type(error).__name__)
            raise
        finally:
            TRACE.reset(token)
            if span.is_recording():
                name, attributes = _description(scope)
                span.update_name(name)
                span.set_attributes(attributes)
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    mark_failed(span, str(status))
            span.end()


def _context_of(headers: Headers) -> tuple[str | None, str | None]:
    """Return `traceparent`, unless there are several, and `tracestate`, which may be in parts."""
    traces, states = headers.getlist("traceparent"), headers.getlist("tracestate")
    return (traces[0] if len(traces) == 1 else None), ",".join(states) or None


def _description(scope: Scope) -> tuple[str, dict[str, str | int]]:
    """Return the name of a call's span and its HTTP attributes, once the call was answered."""
    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
    route = getattr(scope.get("route"), "path", "")
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if route:
        attributes["http.route"] = route
    if scope.get("server"):
        attributes["server.address"], attributes["server.port"] = scope["server"][0], scope["server"][1] or 0
    return f"{'HTTP' if method == '_OTHER' else method} {route}".strip(), attributes
