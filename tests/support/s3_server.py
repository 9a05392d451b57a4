"""An S3 server on loopback: moto's, behind a border that can refuse calls and hold them."""

import http.client
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_BUSY = b"<Error><Code>SlowDown</Code><Message>Too many requests of this object</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_CONDITIONS = {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH", "HTTP_X_GOOG_IF_GENERATION_MATCH"}
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}


@dataclass
class S3Server:
    """What a test sets and sees beside the calls of the program."""

    port: int
    read_only: bool = False
    """Refuse every call that writes, as a policy does."""
    write_only: bool = False
    """Refuse every call that reads."""
    denied: bool = False
    """Refuse every call."""
    unconditional: bool = False
    """Pass no condition of a put on, as some servers know none."""
    refused: str = ""
    """Refuse calls with this in their method, path or query: `HEAD /store/name`."""
    milliseconds: bool = False
    """List times with milliseconds, as some servers do, and headers never do."""
    held: str = ""
    """Calls of this method, with this in their query, wait for `released`: `PUT partNumber`."""
    pace: float = 0.0
    """Seconds between two puts of one name; an earlier one is answered 429, as Google's are."""
    calls: list[str] = field(default_factory=list)
    """Method, path and query of what came."""
    waiting: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    _next_put: dict[str, float] = field(default_factory=dict)
    _pacing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it has in its environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, key: str, data: bytes = b"") -> None:
        """Store an object, or make a bucket."""
        assert self.call("PUT", quote(key), data)[0] == 200

    def get(self, key: str) -> bytes | None:
        """The content of an object, None if there is none."""
        status, data = self.call("GET", quote(key))
        return data if status == 200 else None

    def keys(self, bucket: str) -> list[str]:
        """All objects of a bucket."""
        _, listed = self.call("GET", f"{bucket}?list-type=2")
        return [part.split("</Key>")[0] for part in listed.decode().split("<Key>")[1:]]

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """A call that is neither refused nor held."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, f"/{path}", body, {**SIGNED, "x-of-the-test": "1"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_early(self, method: str, path: str) -> bool:
        """Return whether that put comes too soon behind the one before."""
        if not self.pace or method != "PUT":
            return False
        with self._pacing:
            now = time.monotonic()
            is_early = now < self._next_put.get(path, 0.0)
            if not is_early:
                self._next_put[path] = now + self.pace
            return is_early


class _QuietHandler(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


def _plain(backend: "WSGIApplication") -> "WSGIApplication":
    return backend


@contextmanager
def s3_server(
    kind: type[S3Server] = S3Server, speak: "Callable[[WSGIApplication], WSGIApplication]" = _plain
) -> Iterator[S3Server]:
    """A server with nothing in it, which speaks the protocol that `speak` makes of S3's."""
    backend = speak(DomainDispatcherApplication(create_backend_app))
    deciding = threading.Lock()  # moto tests a condition, and writes some time later

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        if "HTTP_X_OF_THE_TEST" in environ:
            return backend(environ, start)
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        call = f"{method} {environ['PATH_INFO']}?{query}"
        server.calls.append(call)
        is_refused = server.refused and server.refused in call
        if server.denied or is_refused or (server.write_only if method in ("GET", "HEAD") else server.read_only):
            start("403 Forbidden", [("content-type", "application/xml"), ("content-length", str(len(_DENIED)))])
            return [_DENIED]
        if server.is_early(method, environ["PATH_INFO"]):
            start("429 Too Many Requests", [("content-length", str(len(_BUSY)))])
            return [_BUSY]
        if server.unconditional:
            for condition in _CONDITIONS:
                environ.pop(condition, None)
        held_method, _, kind = server.held.partition(" ")
        if method == held_method and kind in query:
            server.waiting.set()
            server.released.wait()
        if server.milliseconds and "list-type" in query:
            return [data.replace(b".000Z<", b".789Z<") for data in backend(environ, start)]
        if not environ.keys() & _CONDITIONS:
            return backend(environ, start)
        with deciding:
            return list(backend(environ, start))

    listening = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=_QuietHandler)
    listening.daemon_threads = True
    server = kind(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        server.call("POST", "moto-api/reset")
        yield server
    finally:
        server.released.set()
        listening.shutdown()
        thread.join()
        listening.server_close()
