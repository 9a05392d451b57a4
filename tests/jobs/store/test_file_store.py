"""Files are in the store whole or not at all, are listed in order, and go when their time has
come.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import redis

from jobs.batch.retention import forget_output
from jobs.protocol.ids import BATCH, FILE, is_id, new_id, time_of
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.file_store import BATCH_FILE_SECONDS, FilePage, FileRecord, FileStore
from jobs.store.marker import MARKER
from jobs.store.storage import (
    StoreError,
    StoreFull,
    list_names,
    local_path,
    make_folder,
    read_bytes,
    write_bytes,
)
from jobs.store.store_folder import store_root
from tests.support.control_plane import ROOT
from tests.support.integrity import faults
from tests.support.object_stores import files_below
from tests.support.redis_server import running_server


@pytest.fixture
def store(queue: Queue, location: str) -> FileStore:
    return FileStore(queue, location, forget_output)


def put(
    store: FileStore,
    name: str = "in.jsonl",
    purpose: str = "batch",
    tenant: str = "",
    expires_seconds: int | None = None,
) -> FileRecord:
    with store.begin(filename=name, purpose=purpose, tenant=tenant, expires_seconds=expires_seconds) as upload:
        upload.write(b"one\n")
        upload.write(b"two\n")
        return upload.commit()


def names(store: FileStore) -> list[str]:
    """Every file below the store, but for its marker and the lock of that."""
    return [name for name in files_below(str(store.root)) if name not in (MARKER, f".{MARKER}.lock")]


def folders(store: FileStore) -> list[str]:
    """Of files, with anything in them or not."""
    return list_names(str(store.root / "files"))


def content_name(store: FileStore) -> str:
    """Of a batch's input."""
    return "content.jsonl" if local_path(str(store.root)) else "content"


def listed(
    store: FileStore,
    tenant: str = "",
    *,
    after: str | None = None,
    limit: int = 100,
    order: Literal["asc", "desc"] = "asc",
    purpose: str | None = None,
) -> list[str]:
    return ids(store.list(tenant, after=after, limit=limit, order=order, purpose=purpose))


def ids(page: FilePage) -> list[str]:
    return [record.id for record in page.items]


def test_ids_sort_by_time_and_contain_it() -> None:
    now = time.time()
    made = [new_id(FILE, now + step * 1e-5) for step in range(100)]
    assert made == sorted(made)
    assert time_of(made[0]) == pytest.approx(now, abs=1e-5)
    assert is_id(FILE, made[0])
    for text in (
        made[0][:-1],
        made[0] + "0",
        made[0].upper(),
        f"file-{'../' * 8}",
        "file-",
        "",
        new_id(BATCH, now),
        made[0] + "\n",
    ):
        assert not is_id(FILE, text)
    assert time_of("file-nothing") is None


def test_a_file_comes_and_goes(store: FileStore, redis_client: redis.Redis) -> None:
    record = put(store)
    assert (record.bytes, record.filename, record.suffix, record.complete) == (8, "in.jsonl", ".jsonl", True)
    assert record.expires_at == record.created_at + BATCH_FILE_SECONDS
    assert store.get("", record.id) == record
    assert read_bytes(str(store.content_path(record))) == b"one\ntwo\n"
    assert names(store) == [f"files/{record.id}/{content_name(store)}", f"files/{record.id}/record.json"]
    store.delete("", record.id)
    assert (names(store), listed(store)) == ([], [])
    assert not redis_client.exists(keys.FILE_EXPIRY)
    for again in (store.get, store.delete):
        with pytest.raises(KeyError):
            again("", record.id)


def test_a_file_that_many_delete_at_once_is_gone(store: FileStore) -> None:
    def delete(_: int) -> bool:
        try:
            store.delete("", record.id)
        except KeyError:
            return False
        return True

    for _ in range(20):
        record = put(store)
        with ThreadPoolExecutor(4) as pool:
            assert any(pool.map(delete, range(4)))
        assert (names(store), folders(store)) == ([], [])


def test_a_file_that_cannot_be_listed_is_none(tmp_path: Path) -> None:
    with running_server() as server:
        queue = Queue(connect(server.url), QueueSettings(redis_retry_seconds=0.1))
        with FileStore(queue, str(tmp_path), forget_output).begin(
            filename="a.jsonl", purpose="batch", tenant=""
        ) as upload:
            upload.write(b"x")
            server.stop()
            with pytest.raises(QueueUnavailable):
                upload.commit()
    assert os.listdir(tmp_path / "files") == []


def test_what_is_not_committed_leaves_nothing(store: FileStore, redis_client: redis.Redis) -> None:
    with store.begin(filename="a.jsonl", purpose="batch", tenant="") as upload:
        upload.write(b"x" * 1_000_000)
    assert folders(store) == []
    assert not redis_client.exists(keys.FILE_EXPIRY)
    with (
        pytest.raises(ValueError, match=r"a\.txt"),
        store.begin(filename="a.txt", purpose="batch", tenant="") as upload,
    ):
        upload.commit()
    assert folders(store) == []


def test_a_full_disk_is_named_and_leaves_nothing(queue: Queue, tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    store = FileStore(queue, str(tmp_path), forget_output)
    with store.begin(filename="a.jsonl", purpose="batch", tenant="") as upload:
        upload._file.close()
        upload._file = open("/dev/full", "wb")  # noqa: SIM115
        with pytest.raises(StoreFull, match="No space left on device"):
            upload.write(b"x" * 100_000)
    assert folders(store) == []


def test_the_suffix_is_kept_for_batches_only(store: FileStore) -> None:
    record = put(store, "notes.txt", "user_data")
    assert (record.suffix, record.expires_at) == ("", None)
    assert store.content_path(record).name == "content"


def test_tenants_see_their_own(store: FileStore) -> None:
    mine, theirs = put(store, tenant="a:b"), put(store, tenant="a")
    assert (listed(store, "a:b"), listed(store, "a"), listed(store)) == ([mine.id], [theirs.id], [])
    for use in (store.get, store.delete):
        with pytest.raises(KeyError):
            use("a", mine.id)


def test_pages_are_stable(store: FileStore) -> None:
    made = [put(store).id for _ in range(5)]
    first = store.list("", after=None, limit=2, order="desc", purpose=None)
    assert (ids(first), first.has_more) == ([made[4], made[3]], True)
    made.append(put(store).id)
    store.delete("", made[3])
    second = store.list("", after=made[3], limit=2, order="desc", purpose=None)
    assert (ids(second), second.has_more) == ([made[2], made[1]], True)
    last = store.list("", after=made[1], limit=2, order="desc", purpose=None)
    assert (ids(last), last.has_more) == ([made[0]], False)
    assert listed(store, after=made[2]) == [made[4], made[5]]
    with pytest.raises(KeyError):
        listed(store, after="file-nothing")


def test_a_listing_of_one_purpose(store: FileStore) -> None:
    batch, other = put(store), put(store, purpose="vision")
    assert (listed(store, purpose="batch"), listed(store, purpose="vision"), listed(store, purpose="evals")) == (
        [batch.id],
        [other.id],
        [],
    )


def test_a_result_is_listed_by_its_own_time_once_it_is_complete(store: FileStore) -> None:
    result_id = new_id(FILE, time.time() - 1000)
    before = put(store)
    record = FileRecord(
        id=result_id,
        bytes=3,
        created_at=before.created_at + 1,
        filename="batch_x_output.jsonl",
        purpose="batch_output",
        expires_at=None,
        tenant="",
        suffix=".jsonl",
        batch_id=new_id(BATCH, 0),
        complete=False,
    )
    store.put(record)
    assert store.get("", result_id) == record
    assert listed(store) == [before.id]
    complete = FileRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | {"complete": True})
    store.put(complete)
    assert listed(store) == [before.id, result_id]
    store.delete("", result_id)
    assert listed(store, after=result_id, order="desc") == [before.id]


def test_what_expired_is_gone_at_once_and_removed_by_the_sweep(store: FileStore, redis_client: redis.Redis) -> None:
    kept, short = put(store), put(store, expires_seconds=0)
    assert listed(store) == [kept.id]
    with pytest.raises(KeyError):
        store.get("", short.id)
    assert store.sweep(time.time() + 1) == 1
    assert names(store) == [f"files/{kept.id}/{content_name(store)}", f"files/{kept.id}/record.json"]
    assert redis_client.zcard(keys.files("")) == 1
    assert store.sweep(time.time() + 1) == 0


@pytest.mark.parametrize("committed", [False, True])
def test_a_killed_upload_is_settled_a_day_later(store: FileStore, redis_url: str, committed: bool) -> None:
    """Also where it was killed between the record and the index."""
    kill = "os.kill(os.getpid(), 9)"
    cut = f"files.check = bool; files._queue.commands = lambda commands: {kill}" if committed else kill
    script = f"""
import os
from jobs.queue.connection import connect
from jobs.batch.retention import forget_output
from jobs.store.file_store import FileStore
from jobs.queue.request_queue import Queue
files = FileStore(Queue(connect({redis_url!r})), {str(store.root)!r}, forget_output)
upload = files.begin(filename="a.jsonl", purpose="batch", tenant="")
upload.write(b"x" * 1_000_000)
{cut}
upload.commit()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    is_seen = committed or local_path(str(store.root)) is not None  # no part of an object is
    assert (names(store) != []) == is_seen
    assert listed(store) == []
    assert store.sweep(time.time() + 3600) == 0
    assert (names(store) != []) == is_seen
    assert store.sweep(time.time() + 25 * 3600) == int(is_seen and not committed)
    assert len(listed(store)) == int(committed)
    assert len(names(store)) == (2 if committed else 0)


def test_an_emptied_redis_is_indexed_again(store: FileStore, redis_client: redis.Redis) -> None:
    made = [put(store, tenant="t", purpose="user_data").id for _ in range(3)]
    batch = put(store, tenant="t")
    killed = new_id(FILE, time.time())
    for name in (killed, "something else"):
        make_folder(str(store.root / "files" / name))
        write_bytes(str(store.root / "files" / name / "content.part"), b"x")
    before = {
        name: redis_client.zrange(name, 0, -1)
        for name in redis_client.scan_iter("*file*")
        if name != keys.FILE_EXPIRY.encode()
    }
    redis_client.flushall()
    assert listed(store, "t") == []
    assert store.get("t", batch.id) == batch
    assert store.reindex(store.names()) == []
    assert {name: redis_client.zrange(name, 0, -1) for name in before} == before
    assert listed(store, "t") == [*made, batch.id]
    assert faults(redis_client) == []
    assert store.sweep(batch.created_at + BATCH_FILE_SECONDS) == 2
    assert listed(store, "t") == made


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("ftp://bucket", "its URI must begin with s3://, gs:// or az://"),
        ("s3:///prefix", "and the name of a bucket"),
        ("s3://bucket/prefix?region=x", "a bucket and a prefix alone"),
        ("s3://key:secret@bucket", "a bucket and a prefix alone"),
    ],
)
def test_a_store_elsewhere_is_refused(location: str, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        store_root(location)
