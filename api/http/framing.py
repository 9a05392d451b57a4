"""Refuse requests whose body could be read in two ways.

With two lengths, a proxy in front may see another end of the request than this server, and its rest
becomes the next request of another client (request smuggling). A compressed body would be taken for
plain, and unpacking it would multiply what a client sends.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.errors import error_response
from jobs.protocol import fields
from jobs.protocol.results import ApiError

_AS_IT_IS = "identity"


class Framing:
    """Refuse such a request and end its connection unread, as plain ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal, {"connection": "close"})(scope, receive, send)


def _refusal(headers: Headers) -> ApiError | None:
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "The request states the length of its body twice: send Content-Length or Transfer-Encoding, not both."
        return ApiError(400, message, code="invalid_http_request")
    coding = headers.get("content-encoding") or _AS_IT_IS
    if coding.strip().lower() != _AS_IT_IS:
        message = f"The body is compressed ('Content-Encoding: {fields.shown(coding)}'): send it as it is."
        return ApiError(415, message, code="content_encoding_unsupported")
    return None
