"""What takes the longer the more batches and files there are holds up nothing else, and one that is
broken no other.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch import retention
from jobs.batch.client import get_batch
from jobs.batch.manifest import Manifest, load_manifest
from jobs.batch.rebuild import rebuild_all
from jobs.batch.retention import remove_ended
from jobs.batch.submit import TooManyBatches
from jobs.control import deadlines, ticker, upkeep
from jobs.control.ticker import Ticker
from jobs.protocol.ids import BATCH, new_id
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.store import file_store
from jobs.store.file_store import FileStore
from jobs.store.storage import exclusive
from tests.support.batch_steps import run_to_end, step, tick
from tests.support.integrity import faults
from tests.support.store_batches import (
    finished,
    lines_of,
    manifest_of,
    put,
    serve,
    store_of,
    submit,
    submit_file,
    under_way,
)

DAY = 24 * 3600


@pytest.fixture
def store(redis_client: redis.Redis, tmp_path: Path) -> FileStore:
    """The store of a server that serves `m`."""
    serve(redis_client, "m")
    return store_of(redis_client, tmp_path)


@pytest.fixture
def leader(redis_client: redis.Redis, store: FileStore) -> Ticker:
    return Ticker(Queue(redis_client), str(store.root))


def commands(client: redis.Redis) -> dict[str, int]:
    """How often each was called."""
    stats: Any = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}


def made_ago(store: FileStore, seconds: float) -> Path:
    """The folder of a batch that was made then, without a manifest."""
    folder = store.batch_root(new_id(BATCH, time.time() - seconds))
    folder.mkdir(parents=True)
    return folder


def test_an_emptied_redis_is_rebuilt_the_newest_first_while_the_rest_goes_on(
    redis_client: redis.Redis, tmp_path: Path, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        step(redis_client, finished(redis_client, tmp_path).id)
    running = under_way(redis_client, tmp_path)
    redis_client.flushall()
    monkeypatch.setattr(upkeep, "MOMENT_SECONDS", 0.0)
    tick(leader)
    assert Queue(redis_client).batches() == [running.id]
    assert run_to_end(redis_client, running.id).state == "completed"
    tick(leader)
    assert len(Queue(redis_client).batches()) == 2
    tick(leader)
    assert len(Queue(redis_client).batches()) == 3
    assert faults(redis_client) == []


def test_what_has_ended_is_rebuilt_without_a_write_to_disk(redis_client: redis.Redis, tmp_path: Path) -> None:
    before = step(redis_client, finished(redis_client, tmp_path).id)
    manifest = Path(before.spec.root, "manifest.json")
    stamp = manifest.stat().st_ino, manifest.stat().st_mtime_ns
    redis_client.flushall()
    assert rebuild_all(Queue(redis_client), str(tmp_path / "store")) == (1, [])
    assert get_batch(redis_client, before.id) == before
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == stamp


def test_while_one_batch_is_in_other_hands_only_that_one_is_tried_again(
    redis_client: redis.Redis, tmp_path: Path, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [submit(redis_client, tmp_path, lines_of(1)) for _ in range(4)]
    listed = store_of(redis_client, tmp_path).list("", after=None, limit=9, order="asc", purpose=None)
    redis_client.flushall()
    with exclusive(records[1].spec.root, 0):
        tick(leader)
        assert Queue(redis_client).batches() == [records[index].id for index in (0, 2, 3)]
        assert store_of(redis_client, tmp_path).list("", after=None, limit=9, order="asc", purpose=None) == listed
        tried: list[list[str]] = []
        real = upkeep.rebuild_all
        monkeypatch.setattr(upkeep, "rebuild_all", lambda *arguments: tried.append(arguments[2]) or real(*arguments))
        monkeypatch.setattr(FileStore, "_read", lambda *arguments: pytest.fail("a file's record is read again"))
        tick(leader)
        assert tried == [[records[1].id]]
    tick(leader)
    assert get_batch(redis_client, records[1].id).state == "validating"


def test_a_file_that_cannot_be_read_holds_up_no_batch_and_no_other_file(
    redis_client: redis.Redis, tmp_path: Path, store: FileStore, leader: Ticker
) -> None:
    record = under_way(redis_client, tmp_path)
    broken = put(store, lines_of(2))
    (store.folder(broken) / "record.json").rename(tmp_path / "kept")
    (store.folder(broken) / "record.json").mkdir()
    for flush in (False, True):
        if flush:
            redis_client.flushall()
            tick(leader)
        [found] = store.list("", after=None, limit=9, order="asc", purpose=None).items
        assert found.id == record.spec.input_file_id
    assert run_to_end(redis_client, record.id).state == "completed"
    (store.folder(broken) / "record.json").rmdir()
    (tmp_path / "kept").rename(store.folder(broken) / "record.json")
    store.sweep(time.time() + 2 * 3600)
    assert broken in [file.id for file in store.list("", after=None, limit=9, order="asc", purpose="batch").items]


def test_batches_that_wait_for_a_process_cost_a_tick_one_command_each(
    redis_client: redis.Redis, tmp_path: Path, store: FileStore, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JUDGE_SECONDS", 0.0)  # each tick judges
    monkeypatch.setattr(upkeep, "USAGE_SECONDS", 3600.0)  # none but the first saves the usage of keys
    file_id, spent = put(store, lines_of(1)), []
    tick(leader)
    for _ in range(2):
        for _ in range(20):
            submit_file(redis_client, tmp_path, file_id)
        before = commands(redis_client)
        tick(leader)
        after = commands(redis_client)
        spent.append(sum(after.values()) - sum(before.values()))
    assert spent[1] - spent[0] == 20


def test_windows_that_close_at_once_are_not_all_for_one_tick(
    redis_client: redis.Redis, tmp_path: Path, store: FileStore, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = put(store, lines_of(1))
    batches = [submit_file(redis_client, tmp_path, file_id, seconds=-1.0).id for _ in range(3)]
    monkeypatch.setattr(ticker, "MOMENT_SECONDS", 0.0)
    for count in (1, 2, 3):
        tick(leader)
        assert [get_batch(redis_client, batch).state for batch in batches].count("finalizing") == count


def test_batches_of_a_dead_process_are_found_though_a_tick_has_no_time_for_all(
    redis_client: redis.Redis, tmp_path: Path, store: FileStore, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = put(store, lines_of(1))
    batches = [submit_file(redis_client, tmp_path, file_id).id for _ in range(3)]
    for batch in batches:
        redis_client.hset(keys.batch(batch), "driver", "dead")
    monkeypatch.setattr(ticker, "MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(ticker, "GONE_SECONDS", -1.0)
    for _ in batches:
        tick(leader)
    assert [Queue(redis_client).batch_fields(batch).generation for batch in batches] == [2] * 3


def test_no_more_is_asked_of_a_refused_batch_the_more_are_open(
    redis_client: redis.Redis, tmp_path: Path, store: FileStore
) -> None:
    file_id = put(store, lines_of(1))
    for _ in range(5):
        submit_file(redis_client, tmp_path, file_id, open_batches=5)
    before = commands(redis_client)
    with pytest.raises(TooManyBatches):
        submit_file(redis_client, tmp_path, file_id, open_batches=5)
    after = commands(redis_client)
    assert after["hgetall"] == before["hgetall"]
    assert after["hget"] - before["hget"] == 5


def test_retention_reads_no_batch_that_is_too_young_to_be_due(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = submit(redis_client, tmp_path, lines_of(1))
    queue, store = Queue(redis_client), store_of(redis_client, tmp_path)
    for days in (1.02, 3, 29, 31):
        shutil.copy(Path(record.spec.root, "manifest.json"), made_ago(store, days * DAY))
    unmade = made_ago(store, 1.02 * DAY)
    read: list[str] = []

    def load(root: str) -> Manifest | None:
        read.append(root)
        return load_manifest(root)

    monkeypatch.setattr(retention, "load_manifest", load)
    assert remove_ended(queue, str(store.root), queue.now()) == 1
    assert not unmade.exists()
    assert len(read) == 2, "the one without a manifest, and the one that may have ended thirty days ago"
    assert manifest_of(record).batch_id == record.id


def test_files_that_cannot_be_removed_delay_no_others(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other = (put(store, lines_of(1)) for _ in range(2))
    (store.folder(stuck) / "folder").mkdir()
    monkeypatch.setattr(file_store, "_GROUP", 1)
    later = time.time() + 31 * DAY
    assert [store.sweep(later) for _ in range(2)] == [0, 1]
    assert not store.folder(other).exists()
    (store.folder(stuck) / "folder").rmdir()
    assert [store.sweep(later), store.sweep(later + 3600)] == [0, 1]
    assert not store.folder(stuck).exists()


def test_a_clock_of_redis_that_ran_ahead_removes_nothing(
    redis_client: redis.Redis, tmp_path: Path, leader: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = step(redis_client, finished(redis_client, tmp_path).id)
    monkeypatch.setattr(Queue, "now", lambda queue: time.time() + 31 * DAY)
    tick(leader)
    assert get_batch(redis_client, record.id) == record
    assert store_of(redis_client, tmp_path).get("", str(record.output_file_id)).complete


def test_what_is_wrong_with_a_file_is_on_disk_alone(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = step(redis_client, submit(redis_client, tmp_path, b"nonsense\n" * 1200).id)
    assert (record.state, len(record.errors)) == ("failed", 1001)
    size: Any = redis_client.memory_usage(keys.batch(record.id), samples=0)
    print(f"{size} bytes")
    assert size < 10_000
    Path(record.spec.root, "manifest.json").unlink()
    assert [problem.code for problem in get_batch(redis_client, record.id).errors] == ["errors_unavailable"]
