"""A lease on a key: one process at a time holds it, and must extend it before it expires."""

import contextlib
import secrets

import redis

from jobs.queue.scripts import QueueUnavailable, Scripts


class Lease:
    """A lease that this process holds or tries to get.

    Methods raise what redis-py raises, and `QueueUnavailable`.
    """

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key
        self._token = secrets.token_hex(16)

    def take(self, seconds: float, retry_seconds: float = 0.0) -> bool:
        """Take or extend the lease, and return whether this process holds it.

        Two processes may hold it briefly, if one was suspended for longer than the lease.
        """
        return self._hold(seconds, True, retry_seconds)

    def extend(self, seconds: float) -> bool:
        """Extend the lease, unless it has expired; return whether this process holds it."""
        return self._hold(seconds, False)

    def end(self) -> None:
        """Release the lease. If Redis is unavailable, it expires by itself."""
        with contextlib.suppress(redis.RedisError, QueueUnavailable):
            self._hold(0, False)

    def _hold(self, seconds: float, may_take: bool, retry_seconds: float = 0.0) -> bool:
        arguments = [self._key, self._token, int(seconds * 1000), int(may_take)]
        return bool(Scripts(self._client, retry_seconds).call("hold", arguments))
