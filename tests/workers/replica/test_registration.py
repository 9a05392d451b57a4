"""A worker that ends removes its record, also from a full Redis, and asks one that hangs once."""

import asyncio

import pytest
import redis

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.redis_machine import running_redis_machine
from workers.replica.registration import Registration


@pytest.mark.parametrize("full", [False, True])
def test_the_record_is_removed(redis_client: redis.Redis, full: bool) -> None:
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0.05))
    registration = Registration(queue, ["m"])
    asyncio.run(registration.set_state("ready"))
    assert [worker.id for worker in queue.workers()] == [registration.id]
    redis_client.config_set("maxmemory", int(full))
    try:
        assert asyncio.run(registration.remove(7))
    finally:
        redis_client.config_set("maxmemory", 0)
    assert queue.workers() == []


def test_a_redis_that_hangs_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis_machine() as machine, connect(f"{machine.url}?socket_timeout=0.2") as client:
        registration = Registration(Queue(client, QueueSettings(redis_retry_seconds=0.0)), ["m"])
        machine.hang()
        try:
            assert not asyncio.run(registration.remove(7))
        finally:
            machine.go_on()
    assert caplog.text.count("Redis unavailable") == 1
