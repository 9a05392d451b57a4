"""A web server of files, some of which behave badly."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """What is at each path: a content, or what answers a call."""

    port: int
    at: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answers that have a content."""
    calls: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str) -> str:
        """The URL of a path."""
        return f"http://127.0.0.1:{self.port}{path}"


def redirect_to(url: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """What leads a client to another URL."""
    return answer_with(302, location=url)


def answer_with(status: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer without a content."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (headers | {"content-length": "0"}).items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def claim_size(size: int) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer that claims so many bytes of content, and has none."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(size))
        handler.end_headers()

    return answer


@contextmanager
def file_server() -> Iterator[FileServer]:
    """A server on a port of its own."""

    class FileHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.calls.append(self.path)
            found = server.at.get(self.path.partition("?")[0])
            if callable(found):
                found(self)
                return
            self.send_response(200 if found is not None else 404)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), FileHandler) as listening:
        listening.daemon_threads = True
        server = FileServer(listening.server_port)
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            listening.shutdown()
            thread.join()
