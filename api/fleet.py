"""Which models can be answered now, as the queue's registry says."""

import asyncio
import time
from dataclasses import dataclass

from jobs.protocol import fields
from jobs.protocol.results import ApiError
from jobs.queue.registry import ModelRecord, WorkerRecord
from jobs.queue.request_queue import Queue

_FRESH_SECONDS = 1.0


@dataclass(frozen=True)
class Snapshot:
    """One reading of the registry."""

    workers: list[WorkerRecord]
    models: dict[str, ModelRecord]

    def names(self, *states: str) -> set[str]:
        """Models of the workers in one of `states`."""
        return {name for worker in self.workers if worker.state in states for name in worker.models}

    @property
    def served(self) -> list[ModelRecord]:
        """Models that a worker answers for at the moment, by name."""
        return [self.models[name] for name in sorted(self.names("ready")) if name in self.models]


class Fleet:
    """The registry, read at most once a second."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._snapshot: Snapshot | None = None
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def snapshot(self, fresh: bool = False) -> Snapshot:
        """What is served. `fresh` reads anew."""
        async with self._lock:
            if self._snapshot is None or fresh or time.monotonic() - self._read_at > _FRESH_SECONDS:
                self._snapshot = await asyncio.to_thread(self._read)
                self._read_at = time.monotonic()
            return self._snapshot

    async def require(self, model: str, fresh: bool = False) -> None:
        """Raise `ApiError` unless a worker serves the model: 503 while none is ready that did or
        will, else 404.
        """
        snapshot = await self.snapshot(fresh)
        if model not in snapshot.names("ready") and not fresh:
            snapshot = await self.snapshot(fresh=True)
        if model in snapshot.names("ready"):
            return
        if model in snapshot.names("loading", "initializing"):
            raise ApiError(
                503, f"The model `{model}` is still being loaded; try again.", "server_error", code="model_loading"
            )
        # No models at all: Redis is new, or came back empty a moment ago
        if model in snapshot.models or not snapshot.models:
            raise ApiError(
                503, f"No worker serves the model `{model}` at the moment; try again.", "server_error", code="no_worker"
            )
        raise model_not_found(model, [record.name for record in snapshot.served])

    def _read(self) -> Snapshot:
        return Snapshot(self._queue.workers(), {record.name: record for record in self._queue.models()})


def model_not_found(model: str, served: list[str]) -> ApiError:
    """The 404 that names what is served instead."""
    names = ", ".join(f"`{name}`" for name in served)
    rest = f"Served at the moment: {names}." if served else "No model is served at the moment."
    message = f"The model `{fields.shown(model)}` does not exist or is not served. {rest}"
    return ApiError(404, message, "not_found_error", "model", "model_not_found")
