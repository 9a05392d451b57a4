"""A lease on a folder in a bucket is its holder's alone."""

import threading
from typing import Any

import pytest
import redis

from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.store import leases
from jobs.store.leases import hold
from jobs.store.storage import Busy
from tests.support.thread_starts import no_thread_starts
from tests.support.waiting import wait_until

FOLDER = "s3://store/batches/batch_a"
NAME = keys.hold(FOLDER)


def test_a_folder_is_held_until_its_holder_lets_go(queue: Queue, redis_client: redis.Redis) -> None:
    for _ in range(2):
        with hold(queue, FOLDER, 0):
            redis_client.script_flush()
            with pytest.raises(Busy), hold(queue, FOLDER, 0):
                raise AssertionError
        assert redis_client.exists(NAME) == 0


def test_a_lease_is_extended(queue: Queue, redis_client: redis.Redis) -> None:
    with hold(queue, FOLDER, 0):
        redis_client.pexpire(NAME, 3_600_000)
        wait_until(lambda: redis_client.pttl(NAME) <= 5000, 60, "the lease is set anew")


def test_leases_are_extended_beside_one_whose_client_fails(queue: Queue, redis_client: redis.Redis) -> None:
    """As a client does that another thread closes."""
    failed = threading.Event()
    other = Queue(connect("redis://localhost:1"))

    def fail(*_: Any, **__: Any) -> bytes:
        if threading.current_thread().name == "leases":
            failed.set()
            raise AttributeError("closed")
        return b"1"

    other.redis.execute_command = fail  # type: ignore[method-assign]
    with hold(other, f"{FOLDER}_b", 0):
        assert failed.wait(60)
        with hold(queue, FOLDER, 0):
            redis_client.pexpire(NAME, 3_600_000)
            wait_until(lambda: redis_client.pttl(NAME) <= 5000, 60, "the lease is set anew")


def test_leases_are_extended_after_a_thread_could_not_be_started(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_renewals", leases._Renewals())
    with no_thread_starts(), pytest.raises(RuntimeError, match="new thread"), hold(queue, FOLDER, 0):
        raise AssertionError
    with hold(queue, FOLDER, 0):
        redis_client.pexpire(NAME, 3_600_000)
        wait_until(lambda: redis_client.pttl(NAME) <= 5000, 60, "the lease is set anew")


def test_one_that_was_too_slow_leaves_the_lease_of_the_next(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next one comes behind the first command with which it lets go."""
    execute, main = queue.redis.execute_command, threading.main_thread()

    def execute_and_be_late(*arguments: Any, **options: Any) -> Any:
        reply = execute(*arguments, **options)
        if threading.current_thread() is main:
            monkeypatch.undo()
            execute("SET", NAME, "the next one's")
        return reply

    with hold(queue, FOLDER, 0):
        redis_client.set(NAME, "the next one's")
    assert redis_client.get(NAME) == b"the next one's"
    redis_client.delete(NAME)
    with hold(queue, FOLDER, 0):
        monkeypatch.setattr(queue.redis, "execute_command", execute_and_be_late)
    assert redis_client.get(NAME) == b"the next one's"
