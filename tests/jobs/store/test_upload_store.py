"""Parts become one file, in the order that the completion names, or nothing; a kill between any two
steps leaves an upload that can be completed, or one that is.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import redis

from jobs.batch.retention import forget_output
from jobs.protocol import fields
from jobs.protocol.ids import UPLOAD, new_id
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.store import upload_store
from jobs.store.file_store import FileStore, Upload
from jobs.store.storage import StoreError, StoreFull, exclusive, is_local, list_names, read_bytes, shared
from jobs.store.upload_store import PART_BYTES, UploadRecord, UploadStore
from tests.support.integrity import faults
from tests.support.killed_steps import killed_before_each_step
from tests.support.object_stores import LOCAL
from tests.support.waiting import wait_until

T = TypeVar("T")

PIECES = [b'{"custom_id":"a"}\n{"cust', b'om_id":"b"}\n', b'{"custom_id":"c"}\n']
WHOLE = b"".join(PIECES)
HOUR = 3600


@pytest.fixture
def files(queue: Queue, location: str) -> FileStore:
    return FileStore(queue, location, forget_output)


@pytest.fixture
def uploads(queue: Queue, files: FileStore) -> UploadStore:
    return UploadStore(queue, files)


def begin(uploads: UploadStore, size: int = len(WHOLE), tenant: str = "t") -> UploadRecord:
    return uploads.create(filename="in.jsonl", purpose="batch", size=size, tenant=tenant)


def add(uploads: UploadStore, upload: UploadRecord, data: bytes) -> str:
    part = uploads.begin_part(upload.tenant, upload.id)
    try:
        part.write(data)
        part.commit()
    finally:
        part.close()
    return part.id


def anything(upload: Upload) -> None:
    """The check of a content that is not looked at."""


def complete(uploads: UploadStore, upload: UploadRecord, part_ids: list[str], **options: Any) -> UploadRecord:
    return uploads.complete(upload.tenant, upload.id, part_ids, options.pop("check", anything), **options)


def left(uploads: UploadStore, upload: UploadRecord) -> set[str]:
    """What is in an upload's folder, but for its record and its lock."""
    return set(list_names(str(uploads.folder(upload.id)))) - {"upload.json", ".lock"}


def listed(files: FileStore, tenant: str = "t") -> list[bytes]:
    """The contents of all files that are listed."""
    page = files.list(tenant, after=None, limit=100, order="asc", purpose=None)
    contents = [read_bytes(str(files.content_path(record))) for record in page.items]
    assert [record.bytes for record in page.items] == list(map(len, contents))
    return contents


def refused(status: int, code: str | None, call: Callable[..., object], *arguments: Any, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    assert (caught.value.status, caught.value.code) == (status, code), caught.value
    return caught.value


def unless_refused(code: str, call: Callable[..., T], *arguments: Any) -> T | None:
    """Return what the call returns, None where it was refused with this code."""
    try:
        return call(*arguments)
    except ApiError as error:
        if error.code != code:
            raise
    return None


def test_parts_become_a_file_in_the_named_order(uploads: UploadStore, files: FileStore) -> None:
    upload = begin(uploads)
    assert (upload.status, upload.expires_at - upload.created_at) == ("pending", HOUR)
    ids = [add(uploads, upload, piece) for piece in reversed(PIECES)][::-1]
    done = complete(uploads, upload, ids, md5=hashlib.md5(WHOLE).hexdigest().upper())
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.filename, done.file.suffix) == (len(WHOLE), "in.jsonl", ".jsonl")
    assert files.get("t", done.file.id) == done.file
    assert listed(files) == [WHOLE]
    assert left(uploads, upload) == set()
    assert complete(uploads, upload, ids) == done
    files.delete("t", done.file.id)
    assert complete(uploads, upload, ids) == done
    assert listed(files) == []
    refused(400, "upload_completed", complete, uploads, upload, ids[::-1])
    refused(400, "upload_completed", add, uploads, upload, b"x")
    refused(400, "upload_completed", uploads.cancel, "t", upload.id)


def test_what_does_not_fit_leaves_the_upload_pending(uploads: UploadStore, files: FileStore) -> None:
    upload, other = begin(uploads), begin(uploads)
    ids = [add(uploads, upload, piece) for piece in PIECES]
    foreign = add(uploads, other, PIECES[0])

    def reject(upload: Upload) -> None:
        fields.fail(f"{upload.bytes} bytes", "file", "bad")

    for wrong in ([*ids, foreign], ["part_"], ["upload.json"], [".lock"], [f"../{upload.id}/{ids[0]}"]):
        refused(400, "invalid_value", complete, uploads, upload, wrong)
    refused(400, "invalid_value", complete, uploads, upload, [ids[0], *ids])
    assert "57" in refused(400, "invalid_value", complete, uploads, upload, ids[:2]).message.replace(
        str(len(WHOLE)), "57"
    )
    refused(400, "invalid_value", complete, uploads, upload, ids, md5="0" * 32)
    assert str(len(WHOLE)) in refused(400, "bad", complete, uploads, upload, ids, check=reject).message
    assert listed(files) == []
    if not is_local(str(files.root)):  # where it is noted for a day that no file comes of them
        files.sweep(time.time() + 25 * HOUR)
    assert list_names(str(files.root / "files")) == []
    assert complete(uploads, upload, ids).status == "completed"
    assert listed(files) == [WHOLE]


def test_another_tenant_s_upload_is_unknown(uploads: UploadStore) -> None:
    upload = begin(uploads)
    for upload_id in (upload.id, new_id(UPLOAD, time.time()), "upload_", "../files"):
        refused(404, None, uploads.get, "other", upload_id)
        refused(404, None, uploads.begin_part, "other", upload_id)
        refused(404, None, uploads.complete, "other", upload_id, ["x"], anything)
        refused(404, None, uploads.cancel, "other", upload_id)


def test_parts_of_many_callers_at_once(uploads: UploadStore, files: FileStore) -> None:
    pieces = [b"%06d\n" % number for number in range(60)]
    upload = begin(uploads, 7 * len(pieces))

    def completed(_: int) -> UploadRecord:
        return wait_until(lambda: unless_refused("upload_busy", complete, uploads, upload, ids), 60, "the completion")

    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda piece: add(uploads, upload, piece), pieces))
        done = list(threads.map(completed, range(8)))
    assert set(map(repr, done)) == {repr(done[0])}
    assert listed(files) == [b"".join(pieces)]


def test_a_part_is_dropped_where_its_upload_ended_meanwhile(uploads: UploadStore) -> None:
    upload = begin(uploads)
    part = uploads.begin_part("t", upload.id)
    part.write(b"x")
    assert uploads.cancel("t", upload.id).status == "cancelled"
    assert uploads.cancel("t", upload.id).status == "cancelled"
    refused(400, "upload_cancelled", part.commit)
    part.close()
    assert left(uploads, upload) == set()
    refused(400, "upload_cancelled", complete, uploads, upload, [part.id])


@LOCAL
def test_a_full_disk_is_named_and_leaves_the_upload_pending(uploads: UploadStore, files: FileStore) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    upload = begin(uploads)
    part = uploads.begin_part("t", upload.id)
    part._file.close()
    part._file = open("/dev/full", "wb")  # type: ignore[assignment]  # noqa: SIM115
    with pytest.raises(StoreFull, match="No space left on device"):
        part.write(b"x" * 100_000)
    part.close()
    assert left(uploads, upload) == set()

    def fill(joined: Upload) -> None:
        joined._file.close()
        joined._file = open("/dev/full", "wb")  # type: ignore[assignment]  # noqa: SIM115
        joined.write(b"x" * 1_000_000)

    ids = [add(uploads, upload, piece) for piece in PIECES]
    with pytest.raises(StoreFull):
        complete(uploads, upload, ids, check=fill)
    assert list_names(str(files.root / "files")) == []
    complete(uploads, upload, ids)
    assert listed(files) == [WHOLE]


def test_parts_have_no_room_without_end(uploads: UploadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_store, "PART_BYTES", 10)
    upload = begin(uploads, 20)
    for _ in range(5):
        add(uploads, upload, b"0123456789")
    refused(400, "upload_full", add, uploads, upload, b"x")
    monkeypatch.setattr(upload_store, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(upload_store, "MOST_PARTS", 5)
    refused(400, "upload_full", add, uploads, upload, b"x")
    assert len(left(uploads, upload)) == 5


def test_parts_that_are_added_at_once_have_no_more_room_together(
    uploads: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_store, "PART_BYTES", 10)
    upload = begin(uploads, 20)

    def send(_: int) -> str | None:
        return unless_refused("upload_full", add, uploads, upload, b"0123456789")

    with ThreadPoolExecutor(8) as threads:
        added = set(threads.map(send, range(40))) - {None}
    assert left(uploads, upload) == added
    assert len(added) <= 5
    for number in range(6):
        send(number)
    assert len(left(uploads, upload)) == 5


@LOCAL
def test_parts_are_added_while_another_is_and_a_completion_has_the_upload_alone(uploads: UploadStore) -> None:
    upload = begin(uploads)
    with shared(str(uploads.folder(upload.id)), 0):
        part_id = add(uploads, upload, WHOLE)
        refused(409, "upload_busy", complete, uploads, upload, [part_id])
        refused(409, "upload_busy", uploads.cancel, "t", upload.id)
    assert complete(uploads, upload, [part_id]).status == "completed"


@LOCAL
def test_no_call_waits_for_a_long_completion(uploads: UploadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"a thread that others need waits {seconds} s")

    upload = begin(uploads)
    part_id = add(uploads, upload, WHOLE)
    monkeypatch.setattr(time, "sleep", sleep)
    with exclusive(str(uploads.folder(upload.id)), 0):
        refused(409, "upload_busy", complete, uploads, upload, [part_id])
        refused(409, "upload_busy", add, uploads, upload, b"x")
        refused(409, "upload_busy", uploads.cancel, "t", upload.id)
        assert left(uploads, upload) == {part_id}
        assert uploads.sweep(time.time() + 2 * HOUR) == 0
    assert complete(uploads, upload, [part_id]).status == "completed"


def age(uploads: UploadStore, upload: UploadRecord, seconds: int = HOUR) -> None:
    record = uploads.folder(upload.id) / "upload.json"
    stored = json.loads(record.read_text())
    record.write_text(json.dumps(stored | {"expires_at": stored["expires_at"] - seconds}))


def test_what_ended_is_removed(uploads: UploadStore, files: FileStore, redis_client: redis.Redis) -> None:
    """Without any help of Redis, which may have come back empty."""
    expired, cancelled, fresh = begin(uploads), begin(uploads), begin(uploads)
    ids = [add(uploads, expired, piece) for piece in PIECES]
    half = uploads.begin_part("t", expired.id)
    for upload in (cancelled, fresh):
        add(uploads, upload, b"x")
    uploads.cancel("t", cancelled.id)
    redis_client.flushall()
    assert uploads.sweep(time.time()) == 0
    age(uploads, expired)
    assert uploads.get("t", expired.id).status_at(time.time()) == "expired"
    refused(400, "upload_expired", complete, uploads, expired, ids)
    refused(400, "upload_expired", add, uploads, expired, b"x")
    refused(400, "upload_expired", uploads.cancel, "t", expired.id)
    assert uploads.sweep(time.time() + HOUR + 1) == 2
    assert left(uploads, expired) == left(uploads, fresh) == set()
    half.close()
    refused(400, "upload_expired", complete, uploads, expired, ids)
    assert uploads.sweep(time.time() + HOUR + 1) == 0
    assert uploads.sweep(time.time() + 24 * HOUR + 1) == 3
    assert list_names(str(files.root / "uploads")) == []
    refused(404, None, complete, uploads, expired, ids)


def test_an_upload_outlives_an_emptied_redis(uploads: UploadStore, files: FileStore, redis_client: redis.Redis) -> None:
    upload = begin(uploads)
    ids = [add(uploads, upload, piece) for piece in PIECES[:2]]
    redis_client.flushall()
    ids.append(add(uploads, upload, PIECES[2]))
    complete(uploads, upload, ids)
    assert listed(files) == [WHOLE]


@LOCAL
def test_kills_between_any_two_steps_of_a_part_leave_a_whole_one_or_none(redis_url: str, uploads: UploadStore) -> None:
    upload = begin(uploads)
    for number in killed_before_each_step(lambda: add(of_its_own(redis_url, uploads), upload, b"x" * 1000)):
        sizes = uploads.parts(upload.id)
        assert set(sizes.values()) <= {1000}, number
    assert sizes
    assert number > 5


@pytest.mark.proof
@LOCAL
@pytest.mark.parametrize("swept", [False, True])
def test_kills_between_any_two_steps_of_a_completion_make_one_file(
    redis_url: str, uploads: UploadStore, files: FileStore, redis_client: redis.Redis, swept: bool
) -> None:
    """The call is repeated, or never."""

    def prepared(number: int) -> tuple[UploadRecord, list[str]]:
        upload = begin(uploads, tenant=f"tenant{number}")
        return upload, [add(uploads, upload, piece) for piece in PIECES]

    made = {1: prepared(1)}
    for number in killed_before_each_step(lambda: complete(of_its_own(redis_url, uploads), *made[len(made)])):
        upload, ids = made[number]
        assert set(listed(files, upload.tenant)) <= {WHOLE}, number
        if swept:
            age(uploads, upload)
            uploads.sweep(time.time() + HOUR + 1)
            is_made = uploads.get(upload.tenant, upload.id).status == "completed"
        else:
            done = complete(uploads, upload, ids)
            is_made = complete(uploads, upload, ids) == done
            assert is_made
            uploads.sweep(time.time() + HOUR + 1)
        assert listed(files, upload.tenant) == [WHOLE] * is_made, number
        assert left(uploads, upload) == set()
        assert faults(redis_client) == []
        made[number + 1] = prepared(number + 1)
    assert is_made
    assert number > 15


def of_its_own(redis_url: str, uploads: UploadStore) -> UploadStore:
    """The same store in another process."""
    queue = Queue(connect(redis_url))
    return UploadStore(queue, FileStore(queue, str(uploads.folder("").parent), forget_output))


def test_a_completion_that_was_thought_dead_makes_no_file(
    uploads: UploadStore, files: FileStore, redis_client: redis.Redis
) -> None:
    """Its lease is gone, and another makes the file."""
    if is_local(str(files.root)):
        return  # where the lock of a folder is not lost

    upload = begin(uploads)
    ids = [add(uploads, upload, piece) for piece in PIECES]
    done: list[UploadRecord] = []

    def complete_beside_another(_: Upload) -> None:
        redis_client.delete(keys.hold(str(uploads.folder(upload.id))))
        done.append(complete(uploads, upload, ids))

    with pytest.raises(StoreError, match="given up"):
        complete(uploads, upload, ids, check=complete_beside_another)
    assert complete(uploads, upload, ids) == done[0]
    assert listed(files) == [WHOLE]
