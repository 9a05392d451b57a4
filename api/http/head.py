"""`HEAD` wherever there is `GET`: the same status and headers, and no body."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answer HEAD with the headers of GET, as plain ASGI middleware.

    The call ends with its headers, so that no body is made.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = False

        async def send_head(message: Message) -> None:
            nonlocal answered
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            answered = True
            raise asyncio.CancelledError

        try:
            await self._app({**scope, "method": "GET"}, receive, send_head)
        except asyncio.CancelledError:
            if not answered:
                raise
