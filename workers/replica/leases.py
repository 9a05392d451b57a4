"""Renew the leases of this worker in a separate thread, which neither the event loop nor the engine
can block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import redis

from jobs.protocol.requests import RequestKey
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Held, Queue, QueueUnavailable
from jobs.queue.streams import ControlMessage

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4


class Leases:
    """Hold the leases of the requests on this worker, from claim to commit. Thread-safe."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        lease_seconds: float,
        generated: Callable[[], int],
        on_lost: Callable[[list[Held]], object],
    ) -> None:
        """Start the renewing thread.

        `generated` returns how many tokens the worker has generated in its life; `on_lost` is
        called in the renewing thread.
        """
        self._queue = queue
        self._worker = worker
        self._pause = lease_seconds / RENEWALS_PER_LEASE
        self._generated = generated
        self._on_lost = on_lost
        self._fences: dict[RequestKey, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; leases still held expire."""
        self._stopped.set()

    def add(self, held: Iterable[Held]) -> None:
        with self._lock:
            self._fences.update(held)

    def drop(self, held: Iterable[Held]) -> None:
        """Remove leases that ended; keep one that was claimed again under another fence."""
        with self._lock:
            for key, fence in held:
                if self._fences.get(key) == fence:
                    del self._fences[key]

    def holds(self, held: Held) -> bool:
        """Return whether a lease is still held, under its fence."""
        key, fence = held
        return self._fences.get(key) == fence

    def named(self, order: ControlMessage) -> list[Held]:
        """Return the held leases of the requests named in a control message."""
        with self._lock:
            of_batch = [key for key in self._fences if key.batch == order.batch] if order.batch else []
            return [(key, self._fences[key]) for key in {*order.keys, *of_batch} if key in self._fences]

    def count(self) -> int:
        """Return the number of leases."""
        return len(self._fences)

    def all(self) -> list[Held]:
        with self._lock:
            return list(self._fences.items())

    def _renew_until_stopped(self) -> None:
        outage = OutageLog(logger, "cannot renew leases", "renewing leases")
        while not self._stopped.wait(self._pause):
            held = self.all()
            try:
                lost = set(self._queue.renew(self._worker, held, self._generated()))
            except (QueueUnavailable, redis.RedisError) as error:
                outage.failed(error)
                continue
            except Exception:
                logger.exception("failed to renew leases")
                continue
            outage.worked()
            if lost and not self._stopped.is_set():
                self._on_lost([(key, fence) for key, fence in held if key in lost])
