"""A relay before an HTTP server, whose connections can be cut and which can be away."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Relay:
    """Listens on a port of its own and passes on what it receives; `url` is the server's, by way of
    it.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_away = False
        self.refused = 0
        self.accepted = 0
        self.received = bytearray()  # from all clients
        self.held_from: bytes | None = None  # replies wait once a client has sent this
        self.replies = threading.Event()
        self.replies.set()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.replies.set()
        self.cut()

    def cut(self) -> None:
        """Ends every connection in the middle of whatever it carries."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    if self.is_away:
                        self.refused += 1
                        client.close()
                        continue
                    self.accepted += 1
                    self._open.add(client)  # at once: none that was accepted outlasts a cut
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            with self._lock:
                self._open.add(server)
            back = threading.Thread(target=_pass_on, args=(server, client, self._reply), daemon=True)
            back.start()
            _pass_on(client, server, self._receive)
            back.join()
            with self._lock:
                self._open.discard(server)
        with self._lock:
            self._open.discard(client)

    def _receive(self, data: bytes, client: socket.socket, server: socket.socket) -> None:
        """Look at what a client sent, before it is passed on."""
        self.received += data
        if self.held_from is not None and self.held_from in self.received:
            self.replies.clear()

    def _reply(self, data: bytes, server: socket.socket, client: socket.socket) -> None:
        """The same, of what the server sent. Both raise OSError to end both connections."""
        self.replies.wait()


def _pass_on(
    source: socket.socket, target: socket.socket, before: Callable[[bytes, socket.socket, socket.socket], None]
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            before(data, source, target)
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
