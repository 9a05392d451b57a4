"""Forgetting a batch leaves nothing that could run again, whenever it is cut off, and removes no
batch that runs.
"""

from pathlib import Path

import pytest
import redis

from jobs.batch import forgetting
from jobs.batch.client import BatchRefused, get_batch
from jobs.batch.forgetting import forget_batch
from jobs.batch.rebuild import rebuild
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.store.storage import Busy, StoreError, exclusive
from tests.support.batch_steps import begin, run_to_end, step
from tests.support.control_plane import write_input
from tests.support.kills import Killed
from tests.support.store_batches import finished, store_of, under_way


def note_problem(client: redis.Redis, batch: str) -> None:
    queue = Queue(client)
    state = queue.batch_fields(batch).state
    assert queue.transition(batch, [state], state, {"problem": "the disk is full"})


def test_a_running_batch_that_redis_lost_is_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path)
    queue, files = Queue(redis_client), store_of(redis_client, tmp_path)
    redis_client.flushall()
    with pytest.raises(BatchRefused, match=f"{record.id} is in_progress .*wait .*`pipeline jobs`"):
        forget_batch(queue, files, record.id)
    assert rebuild(queue, record.spec.root)
    assert run_to_end(redis_client, record.id).state == "completed"


def test_an_ended_batch_that_redis_lost_is_removed(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = run_to_end(redis_client, finished(redis_client, tmp_path).id)
    queue, files = Queue(redis_client), store_of(redis_client, tmp_path)
    redis_client.flushall()
    forget_batch(queue, files, record.id)
    assert not Path(record.spec.root).exists()


@pytest.mark.parametrize("place", ["Queue.unlist_batch", "Queue.forget", "shutil.rmtree"])
def test_what_a_kill_left_does_not_run_again(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    record = under_way(redis_client, tmp_path)
    queue, files = Queue(redis_client, QueueSettings(lost_batch_seconds=0)), store_of(redis_client, tmp_path)
    note_problem(redis_client, record.id)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"{forgetting.__name__}.{place}", kill)
        with pytest.raises(Killed):
            forget_batch(queue, files, record.id)
    assert not rebuild(queue, record.spec.root)
    if queue.batch_fields(record.id).exists:
        assert step(redis_client, record.id, queue).state == "failed"
    forget_batch(queue, files, record.id)
    assert not Path(record.spec.root).exists()
    with pytest.raises(KeyError):
        get_batch(redis_client, record.id)


def test_a_folder_that_cannot_be_changed_leaves_the_batch_known(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path)
    note_problem(redis_client, record.id)
    manifest = Path(record.spec.root) / "manifest.json"
    manifest.unlink()
    manifest.mkdir()  # root may remove any file, but no folder this way
    with pytest.raises(StoreError, match=f"cannot remove {manifest}"):
        forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), record.id)
    assert get_batch(redis_client, record.id).state == "in_progress"


def test_a_batch_beside_its_output_is_held_meanwhile(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begin(redis_client, write_input(tmp_path / "in.jsonl", 5))
    note_problem(redis_client, record.id)
    monkeypatch.setattr(forgetting, "_PATIENCE_SECONDS", 0.0)
    with exclusive(record.spec.root, 0), pytest.raises(Busy):
        forget_batch(Queue(redis_client), store_of(redis_client, tmp_path), record.id)
    assert get_batch(redis_client, record.id).state == "validating"
