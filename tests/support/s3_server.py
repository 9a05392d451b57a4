"""An S3 server on loopback: moto's, behind a border that can refuse calls and hold them."""

import http.client
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}


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
    refused: str = ""
    """Refuse calls with this in their query."""
    held: str = ""
    """Calls of this method, with this in their query, wait for `released`: `PUT partNumber`."""
    calls: list[str] = field(default_factory=list)
    """Method, path and query of what came."""
    waiting: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

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
            connection.request(method, f"/{path}", body, {**_SIGNED, "x-of-the-test": "1"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class _QuietHandler(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with nothing in it."""
    backend = DomainDispatcherApplication(create_backend_app)

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        if "HTTP_X_OF_THE_TEST" in environ:
            return backend(environ, start)
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        server.calls.append(f"{method} {environ['PATH_INFO']}?{query}")
        is_refused = server.refused and server.refused in query
        if server.denied or is_refused or (server.write_only if method in ("GET", "HEAD") else server.read_only):
            start("403 Forbidden", [("content-type", "application/xml"), ("content-length", str(len(_DENIED)))])
            return [_DENIED]
        held_method, _, kind = server.held.partition(" ")
        if method == held_method and kind in query:
            server.waiting.set()
            server.released.wait()
        return backend(environ, start)

    listening = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=_QuietHandler)
    listening.daemon_threads = True
    server = S3Server(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        server.call("POST", "moto-api/reset")
        yield server
    finally:
        server.released.set()
        listening.shutdown()
        thread.join()
        listening.server_close()
