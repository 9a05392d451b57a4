"""Batches whose end is on disk, while Redis lost it or never got it: nothing that was
published is taken back.
"""

from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.client import BatchRecord, cancel_batch, get_batch
from jobs.batch.ending import begin_cancel
from jobs.batch.manifest import mark_cancelled
from jobs.batch.rebuild import rebuild_all
from jobs.control import finalize, slices
from jobs.control.ticker import Ticker
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import answer_all, begin, step, tick, wait_for_batch
from tests.support.control_plane import Answering, control_plane, failing, write_input
from tests.support.integrity import faults
from tests.support.kills import Killed
from tests.support.rollback import EarlierRedis
from tests.support.store_batches import (
    check_every_line_once,
    finished,
    lines_of,
    manifest_of,
    store_of,
    submit,
    under_way,
)
from tests.support.waiting import wait_until


def roll_back(client: redis.Redis, saved: dict[bytes, tuple[bytes, int]]) -> None:
    """What a failover does, or a power loss within the second of an append-only file."""
    client.flushall()
    for name, (value, lifetime) in saved.items():
        client.restore(name, lifetime, value)


def saved_state(client: redis.Redis) -> dict[bytes, tuple[bytes, int]]:
    """All that the server holds."""
    found: Any = client.keys("*")
    return {name: (client.dump(name), max(0, client.pttl(name))) for name in found}  # type: ignore[misc]


def killed_before_redis_knew(client: redis.Redis, record: BatchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job saves the batch's end and dies."""
    real = slices.Slice._transition

    def die(held: slices.Slice, state: str | None, *arguments: Any) -> None:
        if state is not None:
            raise Killed
        real(held, state, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(slices.Slice, "_transition", die)
        with pytest.raises(Killed):
            step(client, record.id)


@pytest.mark.parametrize("expiring", [False, True])
@pytest.mark.parametrize("lost", ["drains", "end"])
def test_a_redis_that_lost_the_end(redis_client: redis.Redis, tmp_path: Path, lost: str, expiring: bool) -> None:
    if lost == "drains":
        record = submit(redis_client, tmp_path, lines_of(20))
        step(redis_client, record.id)
        step(redis_client, record.id)
        answer_all(redis_client, failing(3))
    else:
        record = finished(redis_client, tmp_path)
    saved = saved_state(redis_client)
    while not (ended := step(redis_client, record.id)).ended:
        pass
    roll_back(redis_client, saved)
    if expiring:
        redis_client.hset(keys.batch(record.id), "expires_at", 1)
        tick(Ticker(Queue(redis_client)))
    again = step(redis_client, record.id)
    assert (again.state, again.timestamps["completed"], again.usage) == (
        "completed",
        ended.timestamps["completed"],
        ended.usage,
    )
    check_every_line_once(redis_client, tmp_path, again, 20)
    assert Queue(redis_client).open_batches("") == []


def test_a_redis_that_lost_the_end_while_lines_ran(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = submit(redis_client, tmp_path, lines_of(20))
    step(redis_client, record.id)
    step(redis_client, record.id)
    claims = Queue(redis_client).claim("w", 1, 5, models=["m"])
    assert len(claims) == 5
    saved = saved_state(redis_client)
    while not (ended := step(redis_client, record.id)).ended:
        answer_all(redis_client, failing(3))
        Queue(redis_client).requeue("w", [(claim.key, claim.fence) for claim in claims])
    roll_back(redis_client, saved)
    again = step(redis_client, record.id)
    assert (again.state, again.completed, again.failed) == (ended.state, 19, 1)
    assert Queue(redis_client).claim("w", 100, 5, models=["m"]) == []
    check_every_line_once(redis_client, tmp_path, again, 20)


def test_a_local_batch_whose_end_was_lost(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines_of(20))
    record = begin(redis_client, source)
    while (record := step(redis_client, record.id)).state != "finalizing":
        answer_all(redis_client, failing(3))
    saved = saved_state(redis_client)
    ended = step(redis_client, record.id)
    roll_back(redis_client, saved)
    again = step(redis_client, record.id)
    assert (again.state, again.completed, again.failed, again.output) == ("completed", 19, 1, ended.output)
    assert faults(redis_client) == []


def test_an_output_that_is_deleted_before_redis_knows_of_the_end(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finished(redis_client, tmp_path)
    killed_before_redis_knew(redis_client, record, monkeypatch)
    store_of(redis_client, tmp_path).delete("", str(record.spec.output_file_id))
    ended = step(redis_client, record.id)
    assert (ended.state, ended.problem, ended.completed, ended.failed) == ("completed", None, 19, 1)
    with pytest.raises(KeyError):
        store_of(redis_client, tmp_path).get("", str(record.spec.output_file_id))


def test_every_bad_line_is_reported_after_a_kill(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = submit(redis_client, tmp_path, b"nonsense\n" * 5)
    killed_before_redis_knew(redis_client, record, monkeypatch)
    ended = step(redis_client, record.id)
    assert (ended.state, ended.total, [error.line for error in ended.errors]) == ("failed", 0, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_cancelled_before_redis_knew_of_the_end(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied: bool, bad: bool
) -> None:
    record = submit(redis_client, tmp_path, b"bad\n") if bad else finished(redis_client, tmp_path)
    killed_before_redis_knew(redis_client, record, monkeypatch)
    mark_cancelled(record.spec.root)  # by a client that saw no end yet
    queue = Queue(redis_client)
    assert begin_cancel(queue, record.id, queue.batch_fields(record.id).generation)
    assert get_batch(redis_client, record.id).state == "cancelling"
    if emptied:
        redis_client.flushall()
        tick(Ticker(Queue(redis_client), str(tmp_path / "store")))
    else:
        step(redis_client, record.id)
    ended = get_batch(redis_client, record.id)
    assert (ended.state, ended.outcome, ended.errors) == ("cancelled", "cancelled", [])
    assert {"cancelling", "cancelled"} <= set(ended.timestamps)
    assert {"completed", "failed"}.isdisjoint(manifest_of(ended).timestamps)
    if bad:
        assert (ended.total, ended.completed, ended.failed) == (0, 0, 0)
    else:
        check_every_line_once(redis_client, tmp_path, ended, 20)


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing"])
def test_a_redis_that_lost_the_cancel(redis_client: redis.Redis, tmp_path: Path, state: str) -> None:
    if state == "validating":
        record = submit(redis_client, tmp_path, lines_of(20))
    else:
        record = (under_way if state == "in_progress" else finished)(redis_client, tmp_path)
    saved = saved_state(redis_client)
    cancel_batch(redis_client, record.id)
    for generations in (5, 10):  # while it is cancelling, and when it has ended
        roll_back(redis_client, saved)
        # As the ticker does until it is beyond the manifest's
        redis_client.hincrby(keys.batch(record.id), "generation", generations)
        while not (ended := step(redis_client, record.id)).ended:
            assert ended.state == "cancelling"
        assert ended.state == "cancelled"
    if ended.total:
        check_every_line_once(redis_client, tmp_path, ended, 20)


def test_a_cancel_that_came_too_late_is_forgotten(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finished(redis_client, tmp_path)
    real = finalize.publish_result_files

    def mark_first(*arguments: Any) -> None:
        mark_cancelled(record.spec.root)  # by a caller that is killed before it moves the state
        real(*arguments)

    monkeypatch.setattr(finalize, "publish_result_files", mark_first)
    assert step(redis_client, record.id).state == "completed"
    redis_client.flushall()
    rebuild_all(Queue(redis_client), str(tmp_path / "store"))
    assert get_batch(redis_client, record.id).state == "completed"


@pytest.mark.parametrize("end", ["completed", pytest.param("cancelled", marks=pytest.mark.proof)])
def test_processes_that_live_on_bring_a_batch_to_its_end_again(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, end: str
) -> None:
    """They took it for ended, and its record names one of them."""
    with control_plane(redis_url):
        batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 50)).id
        wait_until(lambda: get_batch(redis_client, batch).state == "in_progress", 60, "the batch to run")
        earlier = EarlierRedis(redis_client)
        if end == "cancelled":
            cancel_batch(redis_client, batch)
        else:
            with Answering(redis_url):
                wait_for_batch(redis_client, batch, 60)
        ended = wait_for_batch(redis_client, batch, 60)
        wait_until(lambda: not redis_client.exists(keys.ACTIVE), 60, "its keys to be removed")
        earlier.restore()
        wait_until(lambda: not redis_client.exists(keys.ACTIVE), 60, "its keys to be removed again")
    again = get_batch(redis_client, batch)
    assert Queue(redis_client).batch_fields(batch).state == again.state == end
    assert (again.completed, again.failed) == (ended.completed, ended.failed)
    assert faults(redis_client) == []
