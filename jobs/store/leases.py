"""Holds on folders of batches: a lock of the file system, or for a bucket a lease in Redis.

A lease expires while its holder is stopped, and is lost with an emptied Redis. It prevents two
processes from doing the same work; conditional puts protect their writes from each other.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from jobs.queue import keys
from jobs.queue.base import QueueBase
from jobs.queue.lease import Lease
from jobs.store.storage import Busy, exclusive, is_local

LEASE_SECONDS = 5.0
_RENEW_SECONDS = 1.0
_POLL_SECONDS = 0.05


def hold(queue: QueueBase, root: str, patience: float) -> contextlib.AbstractContextManager[None]:
    """Hold a folder against other processes.

    Raise `Busy` after `patience` seconds, `StoreError`, and for a bucket `QueueUnavailable`.
    """
    return exclusive(root, patience) if is_local(root) else _leased(queue, root, patience)


@contextlib.contextmanager
def _leased(queue: QueueBase, root: str, patience: float) -> Iterator[None]:
    lease = Lease(queue.redis, keys.hold(root))
    deadline = time.monotonic() + patience
    while not lease.take(LEASE_SECONDS, queue.settings.redis_retry_seconds):
        if time.monotonic() >= deadline:
            raise Busy(f"{root} is in use by another process")
        time.sleep(_POLL_SECONDS)
    try:
        _renewals.add(lease)
        yield
    finally:
        _renewals.remove(lease)
        lease.end()


class _Renewals:
    """Renews the leases of this process in a thread, which starts with the first lease."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: set[Lease] = set()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="leases", daemon=True)
                thread.start()  # may fail; the next lease retries
                self._thread = thread
            self._changed.notify()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._leases.discard(lease)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leases)
                held = list(self._leases)
            for lease in held:
                with contextlib.suppress(Exception):  # this lease expires; the others are still renewed
                    lease.extend(LEASE_SECONDS)
            time.sleep(_RENEW_SECONDS)


_renewals = _Renewals()
