"""A batch whose folder is gone ends, and holds no place of its tenant; one whose file store is only
away does not.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchRecord, BatchRefused, cancel_batch, get_batch
from jobs.batch.forgetting import forget_batch
from jobs.batch.lost import end_lost
from jobs.control.runner import Runner
from jobs.control.ticker import Ticker
from jobs.protocol.requests import Finished
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.store.marker import StoreAway
from tests.support.batch_steps import answer_all, begin, run_to_end, step, tick
from tests.support.control_plane import echo, write_input
from tests.support.integrity import faults
from tests.support.store_batches import finished, lines_of, store_of, submit, under_way

AT_ONCE = QueueSettings(lost_batch_seconds=0)


def remove_folder(root: Path) -> None:
    shutil.rmtree(root)


def remove_manifest(root: Path) -> None:
    (root / "manifest.json").unlink()


def damage_manifest(root: Path) -> None:
    (root / "manifest.json").write_bytes(b"{")


LOSSES = pytest.mark.parametrize("lose", [remove_folder, remove_manifest, damage_manifest])


def work(client: redis.Redis, batch: str, settings: QueueSettings = AT_ONCE) -> BatchRecord:
    return step(client, batch, Queue(client, settings))


@LOSSES
@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing"])
def test_it_ends_as_failed_with_a_reason(
    redis_client: redis.Redis, tmp_path: Path, lose: Callable[[Path], None], state: str
) -> None:
    make = {"in_progress": under_way, "finalizing": finished}.get(state)
    record = make(redis_client, tmp_path) if make else submit(redis_client, tmp_path, lines_of(3))
    record = get_batch(redis_client, record.id)
    assert record.state == state
    answer_all(redis_client, most=2)
    lose(Path(record.spec.root))
    ended = work(redis_client, record.id)
    assert Queue(redis_client).batch_fields(record.id).result_bytes == 0
    assert (ended.state, [error.code for error in ended.errors]) == ("failed", ["batch_lost"])
    assert (ended.total, ended.stored_completed) == (record.total, record.stored_completed)
    assert Queue(redis_client).open_batches("") == []
    assert not redis_client.smembers(keys.ACTIVE)
    assert faults(redis_client) == []
    with pytest.raises(KeyError):
        store_of(redis_client, tmp_path).get("", record.spec.output_file_id or "")


def test_not_before_its_time_and_not_when_it_came_back(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = finished(redis_client, tmp_path)
    root, away = Path(record.spec.root), tmp_path / "away"
    root.rename(away)
    waiting = work(redis_client, record.id, QueueSettings())
    assert (waiting.state, waiting.problem is not None) == ("finalizing", True)
    assert Queue(redis_client).batch_fields(record.id).lost_since > 0
    away.rename(root)
    assert run_to_end(redis_client, record.id).state == "completed"
    assert Queue(redis_client).batch_fields(record.id).lost_since == 0


def test_a_store_that_is_away_fails_no_batch(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = finished(redis_client, tmp_path)
    store, away = tmp_path / "store", tmp_path / "away"
    store.rename(away)
    store.mkdir()
    assert work(redis_client, record.id).state == "finalizing"
    assert Queue(redis_client).batch_fields(record.id).lost_since == 0
    with pytest.raises(StoreAway):
        cancel_batch(redis_client, record.id)
    with pytest.raises(StoreAway):
        forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), record.id)
    store.rmdir()
    away.rename(store)
    assert run_to_end(redis_client, record.id).state == "completed"


@LOSSES
@pytest.mark.parametrize("cancelled_first", [False, True])
def test_a_cancel_ends_it(
    redis_client: redis.Redis, tmp_path: Path, lose: Callable[[Path], None], cancelled_first: bool
) -> None:
    record = under_way(redis_client, tmp_path)
    if cancelled_first:
        cancel_batch(redis_client, record.id)
    lose(Path(record.spec.root))
    ended = work(redis_client, record.id) if cancelled_first else cancel_batch(redis_client, record.id)
    assert ended.state == "cancelled"
    assert {"cancelling", "cancelled"} <= ended.timestamps.keys()
    assert Queue(redis_client).open_batches("") == []
    assert faults(redis_client) == []


def test_a_batch_of_run_batch_whose_folder_another_took(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    first = begin(redis_client, source)
    shutil.rmtree(first.spec.root)
    second = begin(redis_client, source)
    assert work(redis_client, first.id).state == "failed"
    assert run_to_end(redis_client, second.id).state == "completed"


@LOSSES
def test_forget_a_lost_batch(redis_client: redis.Redis, tmp_path: Path, lose: Callable[[Path], None]) -> None:
    record = under_way(redis_client, tmp_path)
    lose(Path(record.spec.root))
    forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), record.id)
    with pytest.raises(KeyError):
        get_batch(redis_client, record.id)
    assert not Path(record.spec.root).exists()
    assert Queue(redis_client).open_batches("") == Queue(redis_client).listed_batches("", None, 9) == []
    Runner(Queue(redis_client)).run(record.id)  # for a driver that still knows it
    assert not Queue(redis_client).batch_fields(record.id).exists
    with pytest.raises(KeyError):
        forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), record.id)


def test_forget_refuses_a_batch_that_runs_well(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path)
    queue, files = Queue(redis_client), store_of(redis_client, tmp_path)
    with pytest.raises(BatchRefused, match=f"{record.id} is in_progress and runs well: cancel it first"):
        forget_batch(queue, files, record.id)
    cancel_batch(redis_client, record.id)
    forget_batch(queue, files, record.id)
    assert not Path(record.spec.root).exists()


def test_forget_an_ended_batch_keeps_its_result_files(redis_client: redis.Redis, tmp_path: Path) -> None:
    ended = run_to_end(redis_client, finished(redis_client, tmp_path).id)
    files = store_of(redis_client, tmp_path)
    assert forget_batch(Queue(redis_client), files, ended.id) == "its result files stay until they expire"
    assert files.content_path(files.get("", ended.output_file_id or "")).stat().st_size > 0


def test_forget_leaves_the_folder_beside_an_output(redis_client: redis.Redis, tmp_path: Path) -> None:
    ended = run_to_end(redis_client, begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id)
    left = forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), ended.id)
    assert ended.spec.root in left
    assert Path(ended.spec.root).is_dir()


def test_an_end_that_was_cut_is_completed(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker runs lines, and the process dies that ended the batch in Redis."""
    record = get_batch(redis_client, under_way(redis_client, tmp_path).id)
    queue = Queue(redis_client, AT_ONCE)
    claims = queue.claim("w9", 1, 2, models=["m"])
    shutil.rmtree(record.spec.root)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "remove_unfinished", _die)
        with pytest.raises(KeyboardInterrupt):
            work(redis_client, record.id)
    assert queue.batch_fields(record.id).state == "failed"
    tick(Ticker(queue))
    assert queue.commit("w9", [Finished(claim.key, claim.fence, echo(claim)) for claim in claims]) == [
        claim.key for claim in claims
    ]
    assert faults(redis_client) == []
    left = redis_client.keys(f"{{q}}:*{record.id}*")
    assert [name.decode() for name in left if redis_client.ttl(name) < 0] == []  # type: ignore[union-attr]
    ended = get_batch(redis_client, record.id)
    assert (ended.completed, ended.failed) == (record.completed, record.failed)


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_batch_that_ended_is_never_lost(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Neither by a job that a late failure ends, nor by a late call."""
    ended = run_to_end(redis_client, finished(redis_client, tmp_path).id)
    queue = Queue(redis_client, AT_ONCE)
    Runner(queue)._note_problem(ended.id, "the disk is full")
    end_lost(queue, ended.id, queue.batch_fields(ended.id), "gone")
    now = get_batch(redis_client, ended.id)
    assert (now.state, now.errors, now.problem) == ("completed", [], None)
    queue.forget(ended.id)
    end_lost(queue, ended.id, queue.batch_fields(ended.id), "gone")
    assert queue.batches() == []
