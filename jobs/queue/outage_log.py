"""Log lines about an outage of Redis: few, however often it is noticed."""

import logging
import re
import threading
import time

import redis

from jobs.queue.scripts import passing_reason

_AGAIN_SECONDS = 60.0
_CALM_SECONDS = 5.0  # without a failure, after which an outage has ended
_COMMAND = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


class OutageLog:
    """Log a line when an outage begins, one a minute, and one when it ends. Thread-safe."""

    def __init__(self, logger: logging.Logger, effect: str, resumed: str) -> None:
        """Set what an outage means for this process, and what goes on after it."""
        self._logger = logger
        self._effect = effect
        self._resumed = resumed
        self._lock = threading.Lock()
        self._failed_at = 0.0
        self._log_at: float | None = None  # None while there is no outage

    def failed(self, error: Exception) -> None:
        """Note that Redis did not answer, or refused."""
        with self._lock:
            self._failed_at = now = time.monotonic()
            if self._log_at is not None and now < self._log_at:
                return
            self._log_at = now + _AGAIN_SECONDS
        self._logger.warning("Redis unavailable; %s: %s", self._effect, explained(error))

    def worked(self) -> None:
        """Note that Redis answered; in a full one, only some calls fail."""
        if self._log_at is None:
            return
        with self._lock:
            if self._log_at is None or time.monotonic() - self._failed_at < _CALM_SECONDS:
                return
            self._log_at = None
        self._logger.info("Redis available again; %s", self._resumed)


def explained(error: Exception) -> str:
    """Return what is wrong with Redis, without the command that found it."""
    text = _COMMAND.sub("", str(error))
    if isinstance(error, redis.AuthenticationError):
        return f"Redis refuses the user or the password: {text}"
    reason = passing_reason(error) if isinstance(error, redis.RedisError) else None
    return f"{reason}: {text}" if reason else text
