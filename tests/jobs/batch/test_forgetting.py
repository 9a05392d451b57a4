"""Forgetting a batch leaves nothing that could run again, whenever it is cut off, and removes no
batch that runs.
"""

import os
from pathlib import Path, PurePath

import pytest
import redis

from jobs.batch import forgetting
from jobs.batch.client import BatchRecord, BatchRefused, get_batch
from jobs.batch.deleted import note_deleted, note_of
from jobs.batch.forgetting import delete_batch, finish_deletions, forget_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.rebuild import rebuild
from jobs.batch.submit import submitted_batch
from jobs.control.ticker import Ticker
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.store import owner
from jobs.store.leases import hold
from jobs.store.storage import Busy, StoreError, exclusive, exists, stamp_of
from tests.support.batch_steps import begin, run_to_end, step, tick
from tests.support.control_plane import failing, write_input
from tests.support.cut_off import ended_before_each_step
from tests.support.integrity import faults
from tests.support.kills import Killed
from tests.support.object_stores import BUCKET_IN_PROOF, LOCAL
from tests.support.rollback import EarlierRedis
from tests.support.store_batches import content_of, finished, lines_of, store_of, submit, under_way


@pytest.fixture(autouse=True)
def _owners_expire_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a bucket, an emptied Redis is another queue."""
    monkeypatch.setattr(owner, "OWNER_TIMEOUT_SECONDS", 0.0)


def changed_at(path: PurePath) -> float:
    stamp = stamp_of(str(path))
    assert stamp is not None
    return stamp[1] / 1e9


def note_problem(client: redis.Redis, batch: str) -> None:
    queue = Queue(client)
    state = queue.batch_fields(batch).state
    assert queue.transition(batch, [state], state, {"problem": "the disk is full"})


def test_a_running_batch_that_redis_lost_is_refused(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    redis_client.flushall()
    with pytest.raises(BatchRefused, match=f"{record.id} is in_progress .*wait .*`pipeline jobs`"):
        forget_batch(queue, files, record.id)
    assert rebuild(queue, record.spec.root)
    assert run_to_end(redis_client, record.id).state == "completed"


def test_an_ended_batch_that_redis_lost_is_removed(redis_client: redis.Redis, folder: PurePath) -> None:
    record = run_to_end(redis_client, finished(redis_client, folder).id)
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    redis_client.flushall()
    forget_batch(queue, files, record.id)
    assert not exists(record.spec.root)


@pytest.mark.parametrize("place", ["Queue.unlist_batch", "Queue.forget", "remove_tree"])
def test_what_a_kill_left_does_not_run_again(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    record = under_way(redis_client, folder)
    queue, files = Queue(redis_client, QueueSettings(lost_batch_seconds=0)), store_of(redis_client, folder)
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
    assert not exists(record.spec.root)
    with pytest.raises(KeyError):
        get_batch(redis_client, record.id)


@LOCAL
def test_a_folder_that_cannot_be_changed_leaves_the_batch_known(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    note_problem(redis_client, record.id)
    manifest = Path(record.spec.root) / "manifest.json"
    manifest.unlink()
    manifest.mkdir()  # root may remove any file, but no folder this way
    with pytest.raises(StoreError, match=f"cannot remove {manifest}"):
        forget_batch(Queue(redis_client), store_of(redis_client, folder), record.id)
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


@BUCKET_IN_PROOF
def test_a_forgotten_batch_leaves_no_partial_output_wherever_it_was_cut_off(
    redis_client: redis.Redis, redis_url: str, folder: PurePath
) -> None:
    """Also where Redis is emptied then; what else is in the folder goes as of any upload."""

    def begun() -> BatchRecord:
        record = under_way(redis_client, folder)
        note_problem(redis_client, record.id)
        return record

    def forget(client: redis.Redis) -> None:
        forget_batch(Queue(client), store_of(client, folder), record.id)

    record = begun()
    for number in ended_before_each_step(redis_client, redis_url, str(folder), forget):
        redis_client.flushall()
        finish_deletions(Queue(redis_client), store_of(redis_client, folder), 0)
        output = store_of(redis_client, folder).folder(record.spec.output_file_id or "") / "record.json"
        assert exists(str(output)) == exists(record.spec.root), number
        record = begun()
    assert number > 15


def ended(client: redis.Redis, folder: PurePath) -> BatchRecord:
    return run_to_end(client, submit(client, folder, lines_of(2)).id, failing(2))


def is_whole(client: redis.Redis, record: BatchRecord) -> bool:
    """Whether the batch is all there; fails if a part of it is."""
    manifest, listed = load_manifest(record.spec.root), Queue(client).listed_batches("", None, 100)
    # How much it was served, Redis keeps for some minutes
    named = [name for name in client.scan_iter("*") if record.id.encode() in name and b":served:" not in name]
    if manifest is not None:
        assert (manifest.state, get_batch(client, record.id).state) == ("completed", "completed")
        assert record.id in listed
        return True
    assert not exists(record.spec.root)
    assert (named, record.id in listed, record.id in Queue(client).batches()) == ([], False, False)
    assert faults(client) == []
    return False


def test_a_deleted_batch_leaves_its_result_files(redis_client: redis.Redis, folder: PurePath) -> None:
    record = ended(redis_client, folder)
    store = store_of(redis_client, folder)
    assert is_whole(redis_client, record)
    assert delete_batch(Queue(redis_client), store, record.id).id == record.id
    assert not is_whole(redis_client, record)
    for file_id in (record.output_file_id, record.error_file_id):
        assert content_of(redis_client, folder, file_id).count(b"\n") == 1
        store.delete("", file_id or "")
    with pytest.raises(KeyError):
        delete_batch(Queue(redis_client), store, record.id)


def test_a_repeated_create_does_not_bring_back_a_deleted_batch(redis_client: redis.Redis, folder: PurePath) -> None:
    record = ended(redis_client, folder)
    queue, store = Queue(redis_client), store_of(redis_client, folder)
    delete_batch(queue, store, record.id)
    with pytest.raises(ApiError, match=f"The batch {record.id} that this request made first was deleted") as refused:
        submitted_batch(queue, store, "", record.id)
    assert refused.value.status == 404


def test_a_batch_that_has_not_ended_is_not_deleted(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    assert delete_batch(Queue(redis_client), store_of(redis_client, folder), record.id).state == "in_progress"
    assert run_to_end(redis_client, record.id).state == "completed"


@pytest.mark.proof
@BUCKET_IN_PROOF
@pytest.mark.parametrize("then", ["nothing", "emptied", "set back"])
def test_a_deletion_that_is_killed_at_any_step_leaves_all_of_the_batch_or_nothing(
    redis_client: redis.Redis, redis_url: str, folder: PurePath, then: str
) -> None:
    def delete(client: redis.Redis) -> None:
        delete_batch(Queue(client), store_of(client, folder), record.id)

    outcomes: list[bool] = []
    record = ended(redis_client, folder)
    earlier = EarlierRedis(redis_client)
    for _ in ended_before_each_step(redis_client, redis_url, str(folder), delete):
        if then == "emptied":
            redis_client.flushall()
        elif then == "set back":
            earlier.restore()
        tick(Ticker(Queue(redis_client), str(folder / "store")))
        outcomes.append(is_whole(redis_client, record))
        assert content_of(redis_client, folder, record.output_file_id).count(b"\n") == 1
        record = ended(redis_client, folder)
        earlier = EarlierRedis(redis_client)
    assert outcomes == sorted(outcomes, reverse=True)
    assert (outcomes[0], outcomes[-1]) == (True, False)
    assert len(outcomes) > 15


def test_a_deleted_batch_does_not_come_back_with_an_earlier_redis(redis_client: redis.Redis, folder: PurePath) -> None:
    """Also one that was under way at that moment."""
    record = finished(redis_client, folder)
    earlier = EarlierRedis(redis_client)
    run_to_end(redis_client, record.id)
    delete_batch(Queue(redis_client), store_of(redis_client, folder), record.id)
    earlier.restore()
    assert get_batch(redis_client, record.id).state == "finalizing"
    tick(Ticker(Queue(redis_client), str(folder / "store")))
    assert not is_whole(redis_client, record)


def test_the_note_of_a_deletion_goes_when_nothing_can_come_back(redis_client: redis.Redis, folder: PurePath) -> None:
    record = ended(redis_client, folder)
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    delete_batch(queue, files, record.id)
    note, kept = note_of(record.spec.root), queue.settings.ended_batch_seconds
    made = changed_at(note)
    finish_deletions(queue, files, made + kept - 1)
    assert exists(str(note))
    finish_deletions(queue, files, made + kept + 1)
    assert not exists(str(note))


@LOCAL
def test_the_note_of_a_deletion_is_as_old_as_the_deletion(redis_client: redis.Redis, folder: PurePath) -> None:
    """Which came after the batch."""
    record = ended(redis_client, folder)
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    delete_batch(queue, files, record.id)
    note, kept = note_of(record.spec.root), queue.settings.ended_batch_seconds
    made = changed_at(note)
    os.utime(note, (made + 100, made + 100))
    finish_deletions(queue, files, made + kept + 50)
    assert exists(str(note))
    finish_deletions(queue, files, made + kept + 101)
    assert not exists(str(note))


@pytest.mark.parametrize("old", [False, True])
def test_deletions_are_finished_in_turn(redis_client: redis.Redis, folder: PurePath, old: bool) -> None:
    """However many are left, and however little time there is."""
    records = [ended(redis_client, folder) for _ in range(3)]
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    for record in records:
        delete_batch(queue, files, record.id) if old else note_deleted(record.spec.root)
    now = max(changed_at(note_of(record.spec.root)) for record in records) + queue.settings.ended_batch_seconds + 1
    after = ""
    for done in (1, 2, 3):
        after = finish_deletions(queue, files, now if old else 0, 0, after)
        gone = [
            not exists(str(note_of(record.spec.root))) if old else not is_whole(redis_client, record)
            for record in records
        ]
        assert gone == [True] * done + [False] * (3 - done)
    assert finish_deletions(queue, files, 0, 0, after) == ""


def test_a_batch_that_a_job_holds_is_deleted_later(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ended(redis_client, folder)
    queue, files = Queue(redis_client), store_of(redis_client, folder)
    monkeypatch.setattr(forgetting, "_PATIENCE_SECONDS", 0.0)
    with hold(queue, record.spec.root, 0):
        with pytest.raises(StoreError, match="in use"):
            delete_batch(queue, files, record.id)
        assert is_whole(redis_client, record)
    delete_batch(queue, files, record.id)
    assert not is_whole(redis_client, record)


@LOCAL
def test_a_deletion_that_cannot_be_finished_holds_up_no_other(redis_client: redis.Redis, folder: PurePath) -> None:
    stuck, other = (ended(redis_client, folder) for _ in range(2))
    for record in (stuck, other):
        note_deleted(record.spec.root)
    manifest = Path(stuck.spec.root) / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.mkdir()
    leader = Ticker(Queue(redis_client), str(folder / "store"))
    tick(leader)
    assert not is_whole(redis_client, other)
    assert Path(stuck.spec.root).exists()
    manifest.rmdir()
    manifest.write_bytes(content)
    tick(Ticker(Queue(redis_client), str(folder / "store")))
    assert not is_whole(redis_client, stuck)
