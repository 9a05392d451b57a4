"""Frames between the worker process and the engine core: 4 bytes of length, little-endian, then one
message as msgpack.
"""

from __future__ import annotations

import socket
import struct
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:  # the core does without it
    import asyncio

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """Return a message, ready to be sent. Raises ValueError for one of 4 GiB or more."""
    body = _encoder.encode(message)
    if len(body) >= 1 << 32:
        raise ValueError(f"a message of {len(body)} bytes does not fit into a frame")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """The blocking side, which the core's reader thread uses."""

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
    """Sends from a thread of its own, so that a slow reader does not block the caller."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages: SimpleQueue[msgspec.Struct | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="send", daemon=True)
        self._thread.start()

    def put(self, message: msgspec.Struct) -> None:
        """Never waits.

        The message must not change any more; once the other side has closed, it goes nowhere.
        """
        self._messages.put(message)

    def close(self, timeout: float = 5.0) -> None:
        """Wait until everything has been sent, for at most `timeout` seconds."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _send(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.sendall(frame(message))
            except OSError:
                return


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message, or None once the other side has closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decoder.decode(await reader.readexactly(length))
    except (EOFError, ConnectionError):
        return None
