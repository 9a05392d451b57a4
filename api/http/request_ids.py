"""Headers of every response: `x-request-id`, which OpenAI's clients show with an error, and those
that a dependency noted.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.protocol.results import new_request_id


class RequestIds:
    """Plain ASGI middleware, so that streams and disconnects pass through untouched.

    `request.state.headers` may hold more headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", request_id)
                for name, value in scope["state"].get("headers", {}).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_named)
