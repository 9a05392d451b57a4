"""Read control messages for this worker from its stream in Redis, in a thread that blocks there:
new work, cancel, watch, make room for quarantined requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import redis

from jobs.queue.connection import MAX_BLOCK_SECONDS
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.streams import FIRST_ID, ControlMessage

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0


class Orders:
    """Read control messages until stopped."""

    def __init__(self, queue: Queue, worker: str, on_orders: Callable[[list[ControlMessage]], object]) -> None:
        """Start the reading thread, in which `on_orders` is called."""
        self._queue = queue
        self._worker = worker
        self._on_orders = on_orders
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_until_stopped, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Deliver no more control messages; the thread ends with its blocking read."""
        self._stopped.set()

    def _read_until_stopped(self) -> None:
        last_id = FIRST_ID
        while not self._stopped.is_set():
            try:
                orders = self._queue.control_messages(self._worker, last_id, MAX_BLOCK_SECONDS)
            except (QueueUnavailable, redis.RedisError) as error:  # also logged by the renewal of leases
                logger.debug("cannot read control messages: %s", error)
                self._stopped.wait(_PAUSE_AFTER_ERROR)
                continue
            except Exception:
                logger.exception("failed to read control messages")
                self._stopped.wait(_PAUSE_AFTER_ERROR)
                continue
            if orders and not self._stopped.is_set():
                last_id = orders[-1].id
                self._on_orders(orders)
