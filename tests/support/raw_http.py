"""HTTP byte by byte, for what no client library would send."""

import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import NamedTuple

import httpx


class RawAnswer(NamedTuple):
    """One answer of a connection."""

    status: int
    headers: dict[str, str]
    body: bytes


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection to the server at `url`."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), 60) as connection:
        yield connection


def exchange(url: str, sent: bytes) -> list[RawAnswer]:
    """Every answer to these bytes, until the server closes the connection."""
    received = b""
    with connected(url) as connection:
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


def get(connection: socket.socket, path: str = "/v1/models") -> HTTPResponse:
    """Ask for a path, and read the whole answer."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    return answer_on(connection)


def answer_on(connection: socket.socket) -> HTTPResponse:
    """Read one answer; its body is in `content`."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.content = answer.read()  # type: ignore[attr-defined]
    return answer


def error_of(answer: HTTPResponse) -> tuple[int, str]:
    """The status and the code of an error in OpenAI's shape."""
    error = json.loads(answer.content)["error"]  # type: ignore[attr-defined]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error["code"]


def _answers(received: bytes) -> list[RawAnswer]:
    source = _ReceivedBytes(received)
    found = []
    while source.file.tell() < len(received):
        answer = HTTPResponse(source)  # type: ignore[arg-type]
        answer.begin()
        found.append(RawAnswer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()))
    return found


class _ReceivedBytes:
    """What `HTTPResponse` wants of a socket."""

    def __init__(self, received: bytes) -> None:
        self.file = _Unclosed(received)

    def makefile(self, _mode: str) -> io.BytesIO:
        return self.file


class _Unclosed(io.BytesIO):
    """The answers that follow are read from it too."""

    def close(self) -> None:
        pass
