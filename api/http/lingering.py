"""Read on for a while after an answer that came before the end of its request's body.

A connection that is closed with unread bytes is reset, and a client that is still sending would see
that instead of the answer.
"""

import asyncio
import contextlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_SECONDS = 5.0
_SMALL_BODY = 64 * 1024  # the server itself reads the rest of a smaller one


class Lingering:
    """Linger after early answers, as plain ASGI middleware: streams pass through untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_large_body(Headers(scope=scope)):
            await _Exchange(receive, send, "expect" in Headers(scope=scope)).run(self._app, scope)
        else:
            await self._app(scope, receive, send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, receive: Receive, send: Send, expects: bool) -> None:
        self._receive = receive
        self._send = send
        self._coming = not expects  # a client that waits for 100 Continue sends nothing before it
        self._ended = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        self._coming = True
        message = await self._receive()
        self._ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._ended:
            await self._send(message)
        elif message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            await self._drop_the_rest()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drop_the_rest(self) -> None:
        if not self._coming:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._ended:
                    await self.receive()


def _has_large_body(headers: Headers) -> bool:
    if "transfer-encoding" in headers:
        return True
    length = headers.get("content-length", "0")
    return length.isdecimal() and int(length) > _SMALL_BODY
