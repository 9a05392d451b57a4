"""The HTTP layer below the app: limits of connections and heads, and fast writes of event streams.

Invalid requests get OpenAI's shape and a request id too.
"""

import asyncio
import ipaddress
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Container
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.http.answer_headers import note_headers
from api.http.cors import cors_headers, with_cors
from api.http.errors import error_response
from api.http.event_stream import BODY_WRITER
from api.http.request_ids import RequestIds
from api.http.route_path import route_path
from api.http_settings import ALIVE, PROBED, HttpSettings
from jobs.protocol.results import ApiError, encode_json, new_request_id

_TOO_LARGE = 431
_LOG_AGAIN_SECONDS = 60.0
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_ORIGIN = re.compile(rb"^origin:[ \t]*(\S+)[ \t]*\r?\n", re.IGNORECASE | re.MULTILINE)

logger = logging.getLogger(__name__)


class HttpProtocol(H11Protocol):
    """uvicorn's protocol with limits, and with OpenAI's shape for answers given without the app.

    The state of a request holds its protocol as the `BodyWriter` of the answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: HttpSettings,
        full: "FullServer",
        addresses: "AddressCounts",
    ) -> None:
        super().__init__(config, server_state, {**app_state, BODY_WRITER: self})
        self.conn: _BoundedConnection = _BoundedConnection(limits)
        self._limits = limits
        self._full = full
        self._addresses = addresses
        self._head_timer: asyncio.TimerHandle | None = None
        self._head = b""  # the received part of an unfinished head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections or self._addresses.are_many(self._address):
            self.app = self._full
        self._set_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_head_timer()
        self._addresses.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head = self._head + data if self.conn.their_state is h11.IDLE else b""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = b""
        if not self._waits_for_the_client():
            self._unset_head_timer()
        elif self._head_timer is None:  # the first part of a later head on the same connection
            self._set_head_timer()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def writable(self) -> bool:
        """Return whether the body of the answer can go on without waiting."""
        return self.conn.chunked and not self.flow.write_paused and not self.transport.is_closing()

    def write_body(self, data: bytes) -> None:
        """Write the next chunk of the body, as the answer's `send` would."""
        self.transport.write(_chunk(data))

    def _waits_for_the_client(self) -> bool:
        """Return whether a head, or the rest of a body after its answer, is still to come.

        uvicorn ends its own timer with the first byte of either.
        """
        theirs = self.conn.their_state
        return theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE)

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # this is called while it is handled
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _TOO_LARGE:
            limits = self._limits
            self._refuse(
                _TOO_LARGE,
                f"The head of the request is over {limits.h11_max_incomplete_event_size} bytes or"
                f" {limits.h11_max_header_count} headers: send less.",
                "request_head_too_large",
            )
        else:
            self._refuse(400, msg, "invalid_http_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._unset_head_timer()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode_json(ApiError(status, message, code=code).body())
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("x-request-id", new_request_id()),
                ("connection", "close"),
                *cors_headers(self._limits, self._origin()),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _origin(self) -> str:
        """Return the origin of a request whose head or body cannot be read, "" if there is none."""
        found = _ORIGIN.search(self._head)
        known = found[1] if found else dict(self.headers or ()).get(b"origin", b"")
        return known.decode("latin-1")

    def _set_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.timeout_head, self._head_is_late)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            seconds = f"{self._limits.timeout_head:g}"
            self._refuse(408, f"The head of the request did not arrive within {seconds} s.", "request_head_timeout")
        else:
            self.transport.close()


class AddressCounts:
    """The connections of each address, of which one may have half of all that there may be.

    The addresses of trusted proxies are not counted, nor are Unix sockets. An IPv6 address is
    counted with its /64.
    """

    def __init__(self, max_connections: int, trusted: Container[str]) -> None:
        self._most = max(1, max_connections // 2)
        self._trusted = trusted
        self._counts: Counter[str] = Counter()

    def are_many(self, address: str, more: int = 0) -> bool:
        """Return whether the address has more than it may have, and `more` beside them."""
        return self._counts[_network(address)] > self._most + more

    def enter(self, address: str) -> None:
        """Count a connection of the address."""
        if address and address not in self._trusted:
            self._counts[_network(address)] += 1

    def leave(self, address: str) -> None:
        """Count a connection of the address no more."""
        network = _network(address)
        if self._counts[network] <= 1:
            del self._counts[network]
        else:
            self._counts[network] -= 1


class FullServer:
    """The ASGI app of connections beyond the limit: probes get their answer, other calls a 503."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._limit = settings.max_connections
        self._refusal = RequestIds(with_cors(self._refuse, settings))
        self._log_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        probed = scope["type"] == "http" and route_path(scope) in (*PROBED, ALIVE)
        if scope["type"] == "http" and not probed:
            note_headers(Request(scope), {"connection": "close"})  # preflights too are the last on their connection
        await (self._app if probed else self._refusal)(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + _LOG_AGAIN_SECONDS
            logger.warning(
                "refusing calls on more than %d connections, or half of them from one address (--max-connections)",
                self._limit,
            )
        message = "The server, or your address, has as many connections as it may have; try again."
        error = ApiError(503, message, "server_error", code="server_full")
        await error_response(error, {"retry-after": "1"})(scope, receive, send)


class _BoundedConnection(h11.Connection):
    """h11's connection with limits of headers and trailers, and with a fast way for chunks."""

    def __init__(self, limits: HttpSettings) -> None:
        super().__init__(h11.SERVER, limits.h11_max_incomplete_event_size)
        self._most_headers = limits.h11_max_header_count
        self._most_bytes = limits.h11_max_incomplete_event_size  # h11 itself checks incomplete heads alone
        self.chunked = False  # whether the last answer has a chunked body

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """Return the bytes of an event.

        Data of a chunked body do not pass through h11's state machine, whose state they do not
        change.
        """
        if isinstance(event, h11.Data) and self.chunked and self.our_state is h11.SEND_BODY:
            return _chunk(event.data)
        output = super().send(event)
        if isinstance(event, h11.Response):
            self.chunked = output is not None and _CHUNKED in output.lower()
        return output

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = len(self._receive_buffer)
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage) and (
            len(event.headers) > self._most_headers or before - len(self._receive_buffer) > self._most_bytes
        ):
            raise h11.RemoteProtocolError("the head or the trailer is too large", error_status_hint=_TOO_LARGE)
        return event


def _network(address: str) -> str:
    """Return an IPv4 address, or the first four groups of an IPv6 address."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    return str(found.ipv4_mapped or ipaddress.IPv6Address(found.packed[:8] + bytes(8)))


def _chunk(data: bytes) -> bytes:
    """Return data as a chunk of a body; an empty one would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
