"""How a run looks after its batch while it waits."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import redis

from jobs import keys
from pipeline.batch_run import BatchRun
from pipeline.signals import Signals

BATCH = "batch_a"


def test_a_wait_ends_soon_after_the_batch_has_moved(redis_client: redis.Redis) -> None:
    redis_client.hset(keys.batch(BATCH), "state", "in_progress")
    move = threading.Timer(0.2, lambda: redis_client.hset(keys.batch(BATCH), "state", "finalizing"))
    move.start()
    began = time.monotonic()
    _wait(redis_client, 60.0)
    assert 0.1 < time.monotonic() - began < 30.0


def test_a_wait_asks_for_nothing_but_the_state(redis_client: redis.Redis) -> None:
    redis_client.hset(keys.batch(BATCH), "state", "in_progress")
    redis_client.config_resetstat()
    _wait(redis_client, 0.3)
    asked = {name.removeprefix("cmdstat_"): count["calls"] for name, count in redis_client.info("commandstats").items()}
    assert asked["hget"] >= 1
    assert asked.keys() <= {"hget", "config|resetstat", "client|setinfo"}


def test_a_server_that_is_away_ends_the_wait(tmp_path: Any) -> None:
    _wait(redis.Redis(unix_socket_path=str(tmp_path / "none.sock")), 3600.0)


def _wait(client: redis.Redis, seconds: float) -> None:
    record: Any = SimpleNamespace(id=BATCH, state="in_progress")
    stack: Any = SimpleNamespace(queue=SimpleNamespace(redis=client))
    with Signals() as signals:
        BatchRun._wait(record, seconds, stack, signals)
