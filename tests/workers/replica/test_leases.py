"""Which leases a worker holds."""

from jobs.protocol.requests import RequestKey
from jobs.queue.request_queue import Queue
from workers.replica.leases import Leases


def test_an_old_fence_drops_no_lease_that_was_taken_anew(queue: Queue) -> None:
    leases = Leases(queue, "w1", 30.0, lambda: 0, lambda lost: None)
    key = RequestKey("batch_a", 0)
    leases.add([(key, 1)])
    leases.add([(key, 2)])
    leases.drop([(key, 1)])
    assert leases.all() == [(key, 2)]
    leases.drop([(key, 2)])
    assert leases.all() == []
