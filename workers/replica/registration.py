"""Register a worker process in Redis, for `pipeline status` among others."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.endpoint import Task
from jobs.queue.registry import EngineRecord, WorkerRecord, WorkerState
from jobs.queue.request_queue import Queue, QueueFull, QueueUnavailable
from workers.engine.messages.core import Ready
from workers.replica.fingerprint import system_fingerprint
from workers.replica.statistics import declared_metrics

_ASSUMED: tuple[Task, ...] = ("generate", "tokenize")
"""The tasks in a worker's record until its model is loaded."""

logger = logging.getLogger(__name__)


class Registration:
    """Register one engine core under its own id, since claim numbers start again with each core."""

    def __init__(
        self, queue: Queue, models: list[str], defaults: DefaultParameters | None = None, aliases: Sequence[str] = ()
    ) -> None:
        self._queue = queue
        host, pid = socket.gethostname(), os.getpid()
        self.id = f"{host}-{pid}-{secrets.token_hex(3)}"
        self._record = WorkerRecord(
            self.id,
            models,
            "loading",
            0,
            time.time(),
            host,
            pid,
            declared_metrics(),
            _ASSUMED,
            defaults=defaults,
            aliases=list(aliases),
        )

    def note_defaults(self, defaults: DefaultParameters) -> None:
        """Set the model's defaults in the next record."""
        self._record = msgspec.structs.replace(self._record, defaults=defaults)

    async def set_state(self, state: WorkerState, info: Ready | None = None) -> None:
        """Write the record with this state; once the core is ready, `info` describes it."""
        engine = {} if info is None else _described(info)
        self._record = msgspec.structs.replace(self._record, state=state, **engine)
        await _call(lambda: self._queue.register_worker(self._record))

    async def remove(self, generated: int) -> bool:
        """Delete the record; leases still held count as lost. Return whether Redis answered.

        `generated` is the number of tokens that the worker generated in its life.
        """
        # A stopping worker makes one call to a Redis that does not respond, with a long timeout
        return await _call(lambda: self._queue.renew(self.id, [], generated)) and await _call(
            lambda: self._queue.remove_worker(self.id)
        )


def _described(info: Ready) -> dict[str, Any]:
    engine = EngineRecord(info.device, info.dtype, info.backend, info.max_num_seqs, system_fingerprint(info))
    return {"max_model_len": info.max_model_len, "engine": engine, "tasks": (*info.tasks, "tokenize")}


async def _call(action: Callable[[], object]) -> bool:
    """Call Redis and return whether it answered; leases and records expire by themselves."""
    try:
        await asyncio.to_thread(action)
    except QueueUnavailable as error:
        logger.warning("Redis unavailable; the worker's record expires unless Redis returns: %s", error)
        return isinstance(error, QueueFull)
    return True
