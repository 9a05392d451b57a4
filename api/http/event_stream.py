"""Server-sent events: comments while none comes, and an end when the client leaves."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jobs.protocol.results import encode_json

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}
_PING = b": ping\n\n"

BODY_WRITER = "body_writer"
"""Name of the `BodyWriter` of an answer in the state of its request."""


class BodyWriter(Protocol):
    """The connection of a request, below all middleware."""

    @property
    def writable(self) -> bool:
        """Return whether the body of the answer can go on without waiting."""

    def write_body(self, data: bytes) -> None:
        """Write the next part of the body."""


def event(value: Any, event_id: str | None = None) -> bytes:
    """Return one event as bytes; None is OpenAI's end mark."""
    data = b"[DONE]" if value is None else encode_json(value)
    head = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    return head + b"data: " + data + b"\n\n"


class EventStream(Response):
    """A response that sends the events of an iterator.

    `close`, if given, is awaited once, however the stream ends.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        ping_seconds: float,
        close: Callable[[], Awaitable[None]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._ping_seconds = ping_seconds
        self._close = close
        self._quiet_since = math.inf  # when the last event was sent, on the monotonic clock
        self._writer: BodyWriter | None = None

    @property
    def writable(self) -> bool:
        """Return whether `write_now` may be called while the next of `events` is awaited."""
        return self._writer is not None and self._writer.writable

    def write_now(self, data: bytes) -> None:
        """Write data past all middleware, behind all that `events` has yielded."""
        assert self._writer is not None
        self._writer.write_body(data)
        self._quiet_since = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get("state", {}).get(BODY_WRITER)
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await self._ping_until_one_ends(sending, leaving, send)
            if sending.done():
                sending.result()
        except OSError:  # the client left between two events
            pass
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            if self._close is not None:
                await self._close()

    async def _ping_until_one_ends(
        self, sending: asyncio.Future[None], leaving: asyncio.Future[None], send: Send
    ) -> None:
        """Send comments until a task ends, by one timer for the whole stream.

        The timer is set anew when it runs out, and not for each event.
        """
        wait = self._ping_seconds
        while not (await asyncio.wait({sending, leaving}, timeout=wait, return_when=asyncio.FIRST_COMPLETED))[0]:
            wait = min(self._quiet_since + self._ping_seconds - time.monotonic(), self._ping_seconds)
            if wait <= 0:
                self._quiet_since, wait = time.monotonic(), self._ping_seconds
                await send({"type": "http.response.body", "body": _PING, "more_body": True})

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._quiet_since = time.monotonic()
        async for data in self._events:
            self._quiet_since = math.inf  # a client that does not read needs no ping
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._quiet_since = time.monotonic()
        self._quiet_since = math.inf
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Wait until the client leaves; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
