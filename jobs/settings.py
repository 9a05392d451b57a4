"""Configuration of everything that talks to the queue; every field is also an environment variable of the same name, in capitals."""

import os
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T", int, float, str)


def _setting(variable: str, default: T) -> Any:
    """A field that has `default` where neither its maker nor the environment says otherwise."""
    return field(default_factory=lambda: _from_environment(variable, default))


def _from_environment(variable: str, default: T) -> T:
    given = os.environ.get(variable)
    if given is None:
        return default
    try:
        return type(default)(given)
    except ValueError:
        raise ValueError(f"{variable} must be a number, got {given!r}") from None


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """One frozen set of values per process. Seconds and bytes unless a comment says otherwise. Raises ValueError for a value out of range.

    Plain, for it is among the first things that every process imports.
    """

    redis_url: str | None = field(default_factory=lambda: os.environ.get("REDIS_URL"))  # none: a private server is started
    lease_seconds: float = _setting("LEASE_SECONDS", 30.0)  # how long a claim lasts without being renewed
    stream_interval: float = _setting("STREAM_INTERVAL", 2.0)  # between the checkpoints of a request that nobody watches
    redis_retry_seconds: float = _setting("REDIS_RETRY_SECONDS", 20.0)  # how long one call tries again while Redis cannot answer
    file_store: str = _setting("FILE_STORE", "./store")  # folder under which files, manifests, parts and outputs stand
    window_bytes: int = _setting("WINDOW_BYTES", 64 * 1024 * 1024)  # request bodies of one batch that stand in Redis at once
    undrained_bytes: int = _setting("UNDRAINED_BYTES", 64 * 1024 * 1024)  # results of a batch in Redis above which none of its lines start
    worker_deaths: int = _setting("WORKER_DEATHS", 1000)  # lost workers after which a request ends; machines die, requests do not
    ended_batch_seconds: int = _setting("ENDED_BATCH_SECONDS", 30 * 24 * 3600)  # how long the queue knows an ended batch; its files stay
    stream_keep_seconds: int = _setting("STREAM_KEEP_SECONDS", 300)  # how long a finished token stream can still be read

    def __post_init__(self) -> None:
        if not self.redis_retry_seconds >= 0:
            raise ValueError(f"redis_retry_seconds must not be negative, got {self.redis_retry_seconds}")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


_ABOVE_ZERO = (
    "lease_seconds",
    "stream_interval",
    "window_bytes",
    "undrained_bytes",
    "worker_deaths",
    "ended_batch_seconds",
    "stream_keep_seconds",
)
