"""A relay before an HTTP server that loses replies, or answers in the server's place."""

import contextlib
import socket
import threading

from tests.support.relay import Relay

_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LONGEST = 1 << 16


class LossyRelay(Relay):
    """`lose(n)` cuts the connection in place of each of the next n replies, which the server gave:
    what was asked is done. `cut_short(n)` passes the first half of each on before.

    A long reply counts once for each piece that comes at a time. While it `is_refusing`, calls are
    answered 503, and those that are being sent do not arrive whole.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._left = 0
        self._passed_on = 0.0  # the share of a lost reply
        self._counting = threading.Lock()
        self.is_refusing = False

    def lose(self, replies: int) -> None:
        with self._counting:
            self._left, self._passed_on = replies, 0.0

    def cut_short(self, replies: int) -> None:
        with self._counting:
            self._left, self._passed_on = replies, 0.5

    def _receive(self, data: bytes, client: socket.socket, server: socket.socket) -> None:
        if self.is_refusing:
            with contextlib.suppress(OSError):
                client.sendall(_UNAVAILABLE)
                client.shutdown(socket.SHUT_WR)
                while client.recv(_LONGEST):  # else its end would be a reset, which may overtake the answer
                    pass
            raise ConnectionError("refused")

    def _reply(self, data: bytes, server: socket.socket, client: socket.socket) -> None:
        with self._counting:
            loses = self._left > 0
            self._left -= loses
        if loses:
            client.sendall(data[: int(len(data) * self._passed_on)])
            raise ConnectionError("lost")
