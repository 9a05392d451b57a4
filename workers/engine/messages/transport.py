"""Frames between the worker process and the engine core.

A frame is 4 bytes of length, little-endian, and one message as msgpack.
"""

from __future__ import annotations

import socket
import struct
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:  # the core does not import it
    import asyncio

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """Return the frame of a message. Raises ValueError for a message of 4 GiB or more."""
    body = _encoder.encode(message)
    if len(body) >= 1 << 32:
        raise ValueError(f"a message of {len(body)} bytes does not fit into a frame")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Reads frames and blocks; used by the core's reader thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb", buffering=1 << 16)

    def read(self, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """Return the next message, or None once the other side has closed."""
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        body = self._file.read(length)
        return decoder.decode(body) if len(body) == length else None


class FrameSender:
    """Sends frames without blocking the caller; thread-safe.

    Data that the socket does not take at once is sent by a thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        self._unsent = 0  # frames, or rests of frames, that the thread has still to send
        self._rest: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_rest, name="send", daemon=True)
        self._thread.start()

    def put(self, message: msgspec.Struct) -> None:
        """Send a message without waiting; drop it after `close`, or if the other side has closed.

        Raise ValueError as `frame` does.
        """
        data = frame(message)
        with self._lock:
            if self._closed:
                return
            sent = 0 if self._unsent else self._send_now(data)
            if sent < len(data):
                self._unsent += 1
                self._rest.put(data[sent:])

    def close(self, timeout: float = 5.0) -> None:
        """Wait until everything has been sent, for at most `timeout` seconds."""
        with self._lock:
            self._closed = True
        self._rest.put(None)
        self._thread.join(timeout)

    def _send_now(self, data: bytes) -> int:
        """Return the number of bytes sent; the thread handles errors, which end it."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _send_rest(self) -> None:
        while (data := self._rest.get()) is not None:
            try:
                self._connection.sendall(data)
            except OSError:
                with self._lock:
                    self._closed = True
                return
            with self._lock:
                self._unsent -= 1


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message, or None once the other side has closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decoder.decode(await reader.readexactly(length))
    except (EOFError, ConnectionError):
        return None
