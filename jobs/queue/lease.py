"""A lease on a key: one process at a time has it, for some seconds unless it extends it."""

import contextlib
import secrets

import redis

from jobs.queue.scripts import QueueUnavailable, Scripts


class Lease:
    """What one process has, or wants. Methods raise what Redis raises, and `QueueUnavailable`."""

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key
        self._token = secrets.token_hex(16)

    def take(self, seconds: float, retry_seconds: float = 0.0) -> bool:
        """Take or extend it, and return whether this process has it now.

        Two may have it for a moment, when one of them was suspended for that long.
        """
        return self._hold(seconds, True, retry_seconds)

    def extend(self, seconds: float) -> bool:
        """The same, unless it has lapsed."""
        return self._hold(seconds, False)

    def end(self) -> None:
        """Let another process take it at once. Where Redis is away it lapses by itself."""
        with contextlib.suppress(redis.RedisError, QueueUnavailable):
            self._hold(0, False)

    def _hold(self, seconds: float, may_take: bool, retry_seconds: float = 0.0) -> bool:
        arguments = [self._key, self._token, int(seconds * 1000), int(may_take)]
        return bool(Scripts(self._client, retry_seconds).call("hold", arguments))
