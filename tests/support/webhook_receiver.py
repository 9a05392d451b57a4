"""A receiver of webhooks: an HTTP server that keeps what is delivered."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "whsec_" + "c2VjcmV0" * 4


@dataclass
class WebhookReceiver:
    """What came so far, as headers and body; `statuses` are of the next answers, then 200."""

    url: str
    statuses: list[int] = field(default_factory=list)
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    """While it is set, nothing is answered."""


@contextmanager
def webhook_receiver() -> Iterator[WebhookReceiver]:
    """A receiver on a port of its own; its URL holds a password."""

    class DeliveryHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
            if receiver.silent.is_set():
                stopping.wait()
                return
            self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
            self.send_header("location", receiver.url)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    stopping = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), DeliveryHandler) as server:
        server.daemon_threads = True
        receiver = WebhookReceiver(f"http://user:pass-word@127.0.0.1:{server.server_port}/webhooks?token=to-ken")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            stopping.set()
            server.shutdown()
            thread.join()
