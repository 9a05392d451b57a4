"""A file store that is away for a moment loses nothing: what is missing is judged only beside the
store's marker.
"""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from jobs.batch.retention import forget_output, remove_ended
from jobs.batch.submit import BatchSubmission, submit_batch
from jobs.control.ticker import Ticker
from jobs.protocol.chat import CHAT
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.store import marker
from jobs.store.file_store import FileStore
from jobs.store.marker import MARKER, StoreAway, check_store, open_store
from jobs.store.storage import join, list_names, local_path, path_of, read_bytes
from tests.support.batch_steps import tick
from tests.support.control_plane import chat_line
from tests.support.store_batches import finished, put, store_of, submit


def take_away(store: Path) -> None:
    """As an unmount: the folder is there, and empty."""
    store.rename(store.with_name("elsewhere"))
    store.mkdir()


def bring_back(store: Path) -> None:
    shutil.rmtree(store)
    store.with_name("elsewhere").rename(store)


def listed(files: FileStore) -> list[str]:
    return [one.id for one in files.list("", after=None, limit=10, order="asc", purpose=None).items]


def test_listings_outlast_a_store_that_is_away(redis_client: redis.Redis, tmp_path: Path) -> None:
    files = store_of(redis_client, tmp_path)
    made = [put(files, chat_line("a")) for _ in range(3)]
    take_away(files.root)
    for call in (
        lambda: listed(files),
        lambda: files.get("", made[0]),
        lambda: files.delete("", made[0]),
        lambda: put(files, b""),
        lambda: files.sweep(time.time() + 1e9),
        lambda: files.reindex(made),
        lambda: remove_ended(Queue(redis_client), str(files.root), time.time() + 1e9),
    ):
        with pytest.raises(StoreAway, match="mount it"):
            call()
    tick(Ticker(Queue(redis_client), str(files.root)))
    assert os.listdir(files.root) == []
    bring_back(files.root)
    assert listed(files) == made
    assert files.sweep(time.time() + 1e9) == 3


def test_no_batch_is_made_on_an_empty_mount_point(redis_client: redis.Redis, tmp_path: Path) -> None:
    files = store_of(redis_client, tmp_path)
    new = BatchSubmission(input_file_id=put(files, b""), endpoint=CHAT, completion_window="24h", seconds=60.0)
    take_away(files.root)
    with pytest.raises(StoreAway):
        submit_batch(Queue(redis_client), files, new)
    assert os.listdir(files.root) == []
    assert Queue(redis_client).open_batches("") == []


def test_an_ended_batch_is_removed_only_where_the_store_is(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = finished(redis_client, tmp_path)
    (tmp_path / "store" / MARKER).unlink()
    with pytest.raises(StoreAway):
        remove_ended(Queue(redis_client), str(tmp_path / "store"), time.time() + 1e9)
    assert Path(record.spec.root).is_dir()


def test_many_that_start_at_once_mark_a_store_once(redis_client: redis.Redis, redis_url: str, location: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: open_store(Queue(connect(redis_url)), path_of(location)), range(8)):
            pass
    lock = [] if local_path(location) is None else [f".{MARKER}.lock"]
    assert list_names(location) == [*lock, MARKER]
    assert read_bytes(join(location, MARKER)).strip() == redis_client.get(keys.STORE)


def test_a_redis_that_came_back_empty_learns_the_store(queue: Queue, redis_client: redis.Redis, location: str) -> None:
    store = path_of(location)
    open_store(queue, store)
    known = redis_client.get(keys.STORE)
    redis_client.flushall()
    check_store(queue, store)
    assert redis_client.get(keys.STORE) == known


def test_two_stores_on_one_redis_are_refused(queue: Queue, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    open_store(queue, one)
    with pytest.raises(StoreAway, match="not the one of this queue"):
        open_store(queue, other)
    queue.redis.delete(keys.STORE)
    open_store(queue, other)
    with pytest.raises(StoreAway, match=r"is store_\w+, and that of this Redis is store_"):
        open_store(queue, one)


def test_a_store_of_the_version_before_gets_a_marker_and_its_empty_mount_point_none(
    redis_client: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    submit(redis_client, tmp_path, chat_line("a"))
    store = tmp_path / "store"
    (store / MARKER).unlink()
    redis_client.delete(keys.STORE)  # that version wrote neither
    take_away(store)
    with pytest.raises(StoreAway, match="is empty, and Redis lists files"):
        FileStore(queue, str(store), forget_output).check()
    assert os.listdir(store) == []
    bring_back(store)
    FileStore(queue, str(store), forget_output).check()
    assert (store / MARKER).exists()
    assert len(listed(store_of(redis_client, tmp_path))) == 1


def test_an_empty_folder_that_was_marked_first_gives_way_to_the_store(
    redis_client: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    """Redis is emptied, and a machine starts before its file system is mounted."""
    files = store_of(redis_client, tmp_path)
    made = put(files, chat_line("a"))
    known = redis_client.get(keys.STORE)
    redis_client.flushall()
    take_away(files.root)
    open_store(queue, files.root)
    mount_point = tmp_path / "mount_point"
    shutil.copytree(files.root, mount_point)
    bring_back(files.root)
    check_store(queue, files.root)
    assert redis_client.get(keys.STORE) == known
    with pytest.raises(StoreAway):  # of another machine; Redis lists no files yet
        check_store(queue, mount_point)
    assert files.reindex([made]) == []
    assert listed(files) == [made]


def test_of_two_stores_with_files_redis_keeps_the_one_that_it_lists(
    redis_client: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    files = store_of(redis_client, tmp_path)
    put(files, chat_line("a"))
    redis_client.flushall()
    take_away(files.root)
    put(store_of(redis_client, tmp_path), chat_line("b"))  # on the mount point
    other = redis_client.get(keys.STORE)
    bring_back(files.root)
    with pytest.raises(StoreAway, match=rf"`redis-cli DEL {keys.STORE}`"):
        check_store(queue, files.root)
    assert redis_client.get(keys.STORE) == other
    redis_client.delete(keys.STORE)
    check_store(queue, files.root)


def test_the_first_marker_stays(queue: Queue, redis_client: redis.Redis, tmp_path: Path) -> None:
    """Another process marks the folder just before this one does."""
    open_store(queue, tmp_path)
    marker._mark(tmp_path)
    assert (tmp_path / MARKER).read_bytes().strip() == redis_client.get(keys.STORE)
    check_store(queue, tmp_path)
