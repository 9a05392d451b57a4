"""A client of event streams that costs little, so that a thousand of them fit into one process with
a test.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from tests.support.event_reader import Event

_SMALL_BUFFER = 4096  # bytes that the kernel holds for a client that reads slowly


@dataclass
class StreamAnswer:
    """One HTTP exchange on a connection of its own.

    Everything raises `OSError` or `EOFError` where the server is not there, or goes away before the
    answer's end.
    """

    url: str
    path: str
    body: dict[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        address = httpx.URL(self.url)
        connection = socket.socket()
        connection.setblocking(False)
        if self.slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port or 80))
            limit = _SMALL_BUFFER if self.slow else 2**16
            self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=limit)
        except BaseException:
            connection.close()
            raise
        self._writer.write(self._request(address))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def begin(self) -> None:
        """Read the answer's head."""
        head, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        self.status = int(head.split()[1])
        self.answer_headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def events(self) -> AsyncIterator[Event]:
        """Yield what an event stream says; None is the end mark."""
        rest = b""
        async for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n\n")
            for lines in whole:
                if (event := _parse(lines.decode())) is not None:
                    yield event

    async def content(self) -> bytes:
        """The rest of an answer that states its length."""
        return await self._reader.readexactly(int(self.answer_headers["content-length"]))

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The chunks of the transfer encoding."""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:size]
        await self._reader.readexactly(2)

    def _request(self, address: httpx.URL) -> bytes:
        method, content = ("GET", b"") if self.body is None else ("POST", json.dumps(self.body).encode())
        headers = {
            "host": address.netloc.decode(),
            "content-type": "application/json",
            "content-length": str(len(content)),
            **self.headers,
        }
        lines = [f"{method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + content


def _parse(lines: str) -> Event | None:
    """None for a comment."""
    fields = dict(line.split(": ", 1) for line in lines.split("\n") if not line.startswith(":"))
    if "data" not in fields:
        return None
    return Event(fields.get("id"), None if fields["data"] == "[DONE]" else json.loads(fields["data"]))
