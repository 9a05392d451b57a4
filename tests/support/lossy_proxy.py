"""A proxy before Redis that loses replies, or holds everything up: what a broken network does to a
caller.
"""

import contextlib
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from redis.connection import parse_url

_LONGEST = 1 << 20


class LossyProxy:
    """Listens on a unix socket.

    `lose(n)` cuts the connection instead of passing on each of the next n replies to scripts;
    `swallow(n)` keeps the connection open, and nothing ever comes over it again. Either may pass on
    some replies before.

    Between `part()` and `join()` nothing gets through in either direction; what was sent meanwhile
    arrives then, late.
    """

    def __init__(self, redis_url: str, scripts_only: bool = True) -> None:
        """Not `scripts_only`: replies to any command count, and may be lost."""
        self._scripts_only = scripts_only
        self._target = parse_url(redis_url)["path"]
        self._folder = tempfile.TemporaryDirectory(prefix="proxy-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._before = self._left = 0
        self._silently = False
        self._lock = threading.Lock()
        self._joined = threading.Event()
        self._joined.set()
        self.lost = 0
        self.replies = 0
        self.url = f"unix://{Path(self._folder.name) / 'p.sock'}"

    def lose(self, replies: int, before: int = 0) -> None:
        with self._lock:
            self._left, self._before, self._silently = replies, before, False

    def swallow(self, replies: int, before: int = 0) -> None:
        with self._lock:
            self._left, self._before, self._silently = replies, before, True

    def part(self) -> None:
        self._joined.clear()

    def join(self) -> None:
        self._joined.set()

    def __enter__(self) -> "LossyProxy":
        self._listener.bind(self.url.removeprefix("unix://"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._joined.set()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One command at a time, as redis-py sends them.

        Whatever breaks, both sides see their connection end.
        """
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            self._joined.wait()
            server.connect(self._target)
            in_script = threading.Event()
            threading.Thread(target=self._pass_replies, args=(server, client, in_script), daemon=True).start()
            while command := client.recv(_LONGEST):
                self._joined.wait()
                if command.startswith(b"*"):
                    (in_script.set if b"\r\nEVAL" in command[:20] else in_script.clear)()
                server.sendall(command)

    def _pass_replies(self, server: socket.socket, client: socket.socket, in_script: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (reply := server.recv(_LONGEST)) and not self._loses(reply, in_script):
                self._joined.wait()
                client.sendall(reply)
            while reply and self._silently and server.recv(_LONGEST):
                pass
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _loses(self, reply: bytes, in_script: threading.Event) -> bool:
        with self._lock:
            counts = (in_script.is_set() or not self._scripts_only) and not reply.startswith(b"-NOSCRIPT")
            lose = counts and self._before == 0 and self._left > 0
            self._before -= counts and self._before > 0
            self._left -= lose
            self.lost += lose
            self.replies += counts
            return lose
