"""Publishing in groups of which each is sent while those before it are still under way."""

from typing import Any

import redis

from jobs.protocol.requests import Delta, RequestKey
from jobs.queue.request_queue import Queue

_MOST_BYTES = 64 * 1024
"""What one delivery has under way at most: less than a socket takes that is not read."""


class Publisher:
    """One worker's tokens on their way to Redis.

    `start` sends a group without waiting for the reply, so that Redis and the API processes work on
    it while the next one is made. `finish` takes the replies, in another thread, and opens the
    connection that this needs. Repeating a publish changes nothing, so `finish` publishes
    everything again where a reply is missing.
    """

    def __init__(self, queue: Queue, worker: str) -> None:
        self._queue = queue
        self._worker = worker
        self._pool = queue.redis.connection_pool
        self._connection: Any = None  # redis-py's, of either kind of server address
        self._replies = 0  # that are still to come
        self._started: list[Delta] = []  # since `finish`
        self._bytes = 0  # of these
        self._may_start = False  # not while `finish` runs, after it failed, or behind what was not sent

    def start(self, deltas: list[Delta], generated: int) -> None:
        """Send these tokens if that needs no waiting."""
        self._may_start = self._may_start and self._send(deltas, generated)
        if self._may_start:
            self._started += deltas

    def finish(self, deltas: list[Delta], generated: int) -> list[RequestKey]:
        """Publish what was started and the rest of `deltas`, as `Queue.publish` does."""
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
        """Return the requests that are lost; None where a reply is missing."""
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
        """Have a connection for the next groups; without one they are published by `finish`."""
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
