"""How a run looks after its batch while it waits."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import redis

from jobs.batch.client import BatchRecord, BatchSpec, create_batch
from jobs.queue import keys
from jobs.queue.connection import connect
from pipeline.batch_run import BatchRun
from pipeline.errors import Unfinished
from pipeline.signals import Signals
from tests.support.waiting import wait_for_end

BATCH = "batch_a"


def test_a_wait_ends_soon_after_the_batch_has_moved(redis_client: redis.Redis) -> None:
    redis_client.hset(keys.batch(BATCH), "state", "in_progress")
    move = threading.Timer(0.2, lambda: redis_client.hset(keys.batch(BATCH), "state", "finalizing"))
    began = time.monotonic()  # before: the test may be held up for longer than the timer waits
    move.start()
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
    _wait(connect(f"unix://{tmp_path}/none.sock"), 3600.0)


def test_a_wait_ends_soon_after_the_first_line_was_taken(redis_client: redis.Redis) -> None:
    redis_client.hset(keys.batch(BATCH), "state", "in_progress")
    redis_client.rpush(keys.ready(BATCH, "demo"), 0, 1)
    take = threading.Timer(0.2, lambda: redis_client.lpop(keys.ready(BATCH, "demo")))
    began = time.monotonic()
    take.start()
    _wait(redis_client, 60.0, running=0)
    assert 0.1 < time.monotonic() - began < 30.0


def test_a_redis_that_is_away_when_the_control_plane_is_looked_for_is_waited_for(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(redis_client, 2)
    monkeypatch.setattr(redis_client, "exists", away)
    assert _follow(redis_client, tmp_path, patience=60.0).state == "cancelled"
    assert away.times_left == 0


def test_a_redis_that_stays_away_then_ends_the_run_with_what_to_do(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "exists", Away(redis_client, 1000))
    with pytest.raises(
        Unfinished,
        match=r"^Redis cannot be used: gone; finished results are kept, run the same command again to go on$",
    ):
        _follow(redis_client, tmp_path, patience=0.0)


class Away:
    """EXISTS of a Redis that is away some times; when it is back, the batch is cancelled."""

    def __init__(self, client: redis.Redis, times: int) -> None:
        self.times_left = times
        self._client = client

    def __call__(self, name: str) -> Literal[True]:
        if self.times_left:
            self.times_left -= 1
            raise redis.ConnectionError("gone")
        self._client.hset(keys.batch(BATCH), "state", "cancelled")
        return True


def _follow(client: redis.Redis, folder: Path, patience: float) -> BatchRecord:
    """A run of a fleet's batch that is not validated yet."""
    source = folder / "in.jsonl"
    source.write_text("{}\n")
    spec = BatchSpec(
        input=str(source), root=str(folder / "root"), output=str(folder / "out.jsonl"), error_file="inline"
    )
    create_batch(client, spec, BATCH)
    task: Any = SimpleNamespace(
        redis_url="given", starts_worker=False, queue=SimpleNamespace(redis_retry_seconds=patience)
    )
    supervisor: Any = SimpleNamespace(check=lambda: 5.0, queue=SimpleNamespace(redis=client))
    progress: Any = SimpleNamespace(update=lambda counts: None)
    with Signals() as signals:
        return BatchRun(task, [], time.monotonic())._follow(BATCH, spec, supervisor, signals, progress, None)


def _wait(client: redis.Redis, seconds: float, running: int = 1) -> None:
    record: Any = SimpleNamespace(id=BATCH, state="in_progress", running=running, models=["demo"], waiting=2)
    supervisor: Any = SimpleNamespace(queue=SimpleNamespace(redis=client))
    task: Any = SimpleNamespace(queue=SimpleNamespace(redis_retry_seconds=0.0))
    run = BatchRun(task, [], time.monotonic())
    with Signals() as signals:
        wait_for_end(lambda: run._wait(record, seconds, supervisor, signals), 120, "the wait to end")
