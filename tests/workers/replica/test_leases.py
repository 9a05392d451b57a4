"""Which leases a worker holds."""

import pytest

from jobs.protocol.requests import RequestKey
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.waiting import wait_until
from workers.replica.leases import Leases
from workers.replica.orders import Orders


def test_an_old_fence_drops_no_lease_that_was_taken_anew(queue: Queue) -> None:
    leases = Leases(queue, "w1", 30.0, lambda: 0, lambda lost: None)
    key = RequestKey("batch_a", 0)
    leases.add([(key, 1)])
    leases.add([(key, 2)])
    leases.drop([(key, 1)])
    assert leases.all() == [(key, 2)]
    leases.drop([(key, 2)])
    assert leases.all() == []


def test_a_refused_password_is_logged_without_a_traceback(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect(redis_url.replace("://", "://:wrong@")) as client:
        queue = Queue(client, QueueSettings(redis_retry_seconds=0.0))
        leases = Leases(queue, "w1", 0.04, lambda: 0, lambda lost: None)
        orders = Orders(queue, "w1", lambda orders: None)
        with caplog.at_level("DEBUG", "workers.replica"):
            leases.start()
            orders.start()
            wait_until(lambda: "cannot read control messages" in caplog.text, 60, "a failed reading")
            wait_until(lambda: "cannot renew leases" in caplog.text, 60, "a failed renewal")
        leases.stop()
        orders.stop()
    assert caplog.text.count("Redis refuses the user or the password") == 1
    assert "Traceback" not in caplog.text
