"""HTTP by its bytes, for what no client library sends."""

import io
import socket
from http.client import HTTPResponse
from typing import NamedTuple

import httpx


class RawAnswer(NamedTuple):
    """One answer of a connection."""

    status: int
    headers: dict[str, str]
    body: bytes


def exchange(url: str, sent: bytes) -> list[RawAnswer]:
    """Every answer to these bytes, until the server closes the connection."""
    address = httpx.URL(url)
    received = b""
    with socket.create_connection((address.host, address.port or 80), 30) as connection:
        try:
            connection.sendall(sent)
            while piece := connection.recv(65536):
                received += piece
        except ConnectionError:  # closed before everything was read
            pass
    return _answers(received)


def head(*lines: str, method: str = "GET", path: str = "/v1/models") -> bytes:
    """The head of a request that is the last one of its connection."""
    given = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *lines, "", ""]
    return "\r\n".join(given).encode("latin-1")


def _answers(received: bytes) -> list[RawAnswer]:
    source = _Bytes(received)
    found = []
    while source.file.tell() < len(received):
        answer = HTTPResponse(source)  # type: ignore[arg-type]
        answer.begin()
        found.append(RawAnswer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()))
    return found


class _Bytes:
    """What `HTTPResponse` wants of a socket."""

    def __init__(self, received: bytes) -> None:
        self.file = _Unclosed(received)

    def makefile(self, _mode: str) -> io.BytesIO:
        return self.file


class _Unclosed(io.BytesIO):
    """The answers that follow are read from it too."""

    def close(self) -> None:
        pass
