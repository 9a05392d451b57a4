"""Pipelined publishing: each group of tokens is sent while earlier ones are in flight."""

from typing import Any

import redis

from jobs.protocol.requests import Delta, RequestKey
from jobs.queue.request_queue import Queue

_MOST_BYTES = 64 * 1024
"""Most bytes in flight for one delivery: fewer than an unread socket accepts."""


class Publisher:
    """Publishes one worker's tokens to Redis.

    `start` sends a group without waiting for the reply, so that Redis and the API processes work on
    it while the next one is made. `finish` reads the replies in another thread, and opens the
    connection. Repeating a publish changes nothing, so `finish` publishes everything again if a
    reply is missing.
    """

    def __init__(self, queue: Queue, worker: str) -> None:
        self._queue = queue
        self._worker = worker
        self._pool = queue.redis.connection_pool
        self._connection: Any = None  # redis-py's, of a plain address or one of Sentinels
        self._replies = 0  # outstanding
        self._started: list[Delta] = []  # since `finish`
        self._bytes = 0  # size of `_started`
        self._may_start = False  # False while `finish` runs, after it failed, or once a group was not sent

    def start(self, deltas: list[Delta], generated: int) -> None:
        """Send these tokens if that does not block."""
        self._may_start = self._may_start and self._send(deltas, generated)
        if self._may_start:
            self._started += deltas

    def finish(self, deltas: list[Delta], generated: int) -> list[RequestKey]:
        """Publish the started groups and the rest of `deltas`, like `Queue.publish`."""
        self._may_start = False
        started, self._started, self._bytes = self._started, [], 0
        lost = self._receive()
        if lost is None:
            self._drop_connection()
            started, lost = [], []
        sent = set(map(id, started))
        if rest := [delta for delta in deltas if id(delta) not in sent]:
            lost += self._queue.publish(self._worker, rest, generated)
        self._open_connection()
        self._may_start = self._connection is not None
        return lost

    def _send(self, deltas: list[Delta], generated: int) -> bool:
        command = self._connection.pack_command(*self._queue.publish_command(self._worker, deltas, generated))
        self._bytes += sum(map(len, command))
        if self._bytes > _MOST_BYTES:
            return False
        self._replies += 1
        try:
            self._connection.send_packed_command(command, check_health=False)
        except (redis.RedisError, OSError):  # closes the connection, so that `finish` gets no reply
            return False
        return True

    def _receive(self) -> list[RequestKey] | None:
        """Return the requests that are lost, or None if a reply is missing."""
        lost: list[RequestKey] = []
        try:
            while self._replies:
                reply = self._connection.read_response()
                self._replies -= 1
                lost += self._queue.take_publish_reply(self._worker, reply)
        except (redis.RedisError, OSError):
            return None
        return lost

    def _open_connection(self) -> None:
        """Open a connection for the next groups; without one, `finish` publishes them."""
        if self._connection is None:
            try:
                self._connection = self._pool.get_connection()
            except (redis.RedisError, OSError):
                return

    def _drop_connection(self) -> None:
        self._replies = 0
        if self._connection is not None:
            self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None
