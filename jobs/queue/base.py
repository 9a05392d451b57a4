"""The common base of the queue's parts: Redis client, scripts and settings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import redis

from jobs.queue.connection import blocking_twin, twin
from jobs.queue.scripts import MAX_ITEMS, Scripts, persistently
from jobs.queue.settings import QueueSettings

T = TypeVar("T")

_MAX_BYTES = 4 * 1024 * 1024
_SIZED = bytes, str


class QueueBase:
    """Base of the parts of `jobs.queue.request_queue.Queue`."""

    def __init__(self, client: redis.Redis, settings: QueueSettings | None = None) -> None:
        self.redis = client
        self.settings = settings or QueueSettings.from_environment()
        self.rq = client if self.settings.rq_db is None else twin(client, db=self.settings.rq_db)
        self._scripts = Scripts(client, self.settings.redis_retry_seconds)
        self._blocking = blocking_twin(client)

    def close(self) -> None:
        """Close the connections of blocking reads and of RQ; the caller closes the client."""
        self._blocking.close()
        if self.rq is not self.redis:
            self.rq.close()

    def _command(self, name: str, *arguments: Any) -> Any:
        """Run a plain Redis command that may be repeated, and return its reply."""
        execute: Callable[..., Any] = self.redis.execute_command
        return persistently(lambda: execute(name, *arguments), self.settings.redis_retry_seconds)

    def commands(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Run plain commands that may be repeated in one round trip, and return their replies."""
        rows = list(commands)

        def run() -> list[Any]:
            with self.redis.pipeline(transaction=False) as pipeline:
                for row in rows:
                    pipeline.execute_command(*row)  # type: ignore[no-untyped-call]
                return pipeline.execute()

        return persistently(run, self.settings.redis_retry_seconds)

    def now(self) -> float:
        """Return unix seconds by the clock of Redis, the only one that all processes share."""
        seconds, micros = self._command("TIME")
        return int(seconds) + int(micros) / 1e6

    @property
    def _lease_ms(self) -> int:
        return int(self.settings.lease_seconds * 1000)


def chunks(items: Iterable[list[Any]]) -> Iterator[list[list[Any]]]:
    """Split argument lists, one per request, into groups that one script call may handle."""
    group: list[list[Any]] = []
    size = 0
    for item in items:
        group.append(item)
        size += sum([len(value) for value in item if isinstance(value, _SIZED)])
        if len(group) == MAX_ITEMS or size > _MAX_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def flat(items: Iterable[Iterable[T]]) -> list[T]:
    """Return one list of all values."""
    return [value for item in items for value in item]


def text(value: bytes | None) -> str:
    """Return a reply as text; None becomes ""."""
    return "" if value is None else value.decode()
