"""A retry makes a batch of exactly the lines without an answer, as they are in the input."""

import gzip
import json
import os
import time
import tracemalloc
from pathlib import Path, PurePath
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch import retry as retry_module
from jobs.batch import submit as submit_module
from jobs.batch.client import BatchRecord, BatchRefused, cancel_batch, get_batch, list_batches
from jobs.batch.manifest import load_manifest
from jobs.batch.retention import forget_output
from jobs.batch.retry import retry_batch
from jobs.batch.submit import BatchSubmission, TooManyBatches
from jobs.control.ticker import Ticker
from jobs.protocol.chat import CHAT
from jobs.protocol.results import ApiError
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.file_store import FileRecord, FileStore
from jobs.store.storage import StoreError, list_names, read_bytes
from tests.support.batch_steps import answer_all, run_to_end, step, tick
from tests.support.control_plane import chat_line, failing
from tests.support.cut_off import ended_before_each_step
from tests.support.object_stores import BUCKET_IN_PROOF, LOCAL
from tests.support.redis_server import running_server
from tests.support.store_batches import (
    check_every_line_once,
    lines_of,
    put,
    serve,
    store_of,
    submit,
    submit_file,
    under_way,
)

# What JSON allows, and a writer of JSON would write in another way
ODD = [
    chat_line("c1").replace(b", ", b" ,  ").replace(b'"body"', b'"\\u0062ody"'),
    b"\n",
    chat_line("c2", "\u00e9 \u2028"),
    b" \t\n",
    chat_line("c3", temperature=0.5).replace(b"0.5", b"5.0E-1"),
    chat_line("c4").rstrip(b"\n"),
]


def retry(client: redis.Redis, folder: PurePath, record: BatchRecord, **asked: Any) -> BatchRecord:
    asked = {"input_file_id": "", "endpoint": CHAT, "completion_window": "24h", "seconds": 86400.0} | asked
    return retry_batch(Queue(client), store_of(client, folder), record, BatchSubmission(**asked))


def input_of(client: redis.Redis, folder: PurePath, record: BatchRecord) -> tuple[FileRecord, bytes]:
    store = store_of(client, folder)
    file = store.get(record.spec.tenant, record.spec.input_file_id or "")
    return file, store.content_path(file).read_bytes()


def listed(client: redis.Redis, folder: PurePath) -> list[FileRecord]:
    return store_of(client, folder).list("", after=None, limit=10_000, order="desc", purpose=None).items


def stored(folder: PurePath) -> list[str]:
    """The names of the folders of files, also of those that are not listed."""
    return list_names(str(folder / "store" / "files"))


def test_a_retry_runs_the_lines_that_failed(redis_client: redis.Redis, folder: PurePath) -> None:
    lines = lines_of(20).splitlines(keepends=True)
    record = run_to_end(redis_client, submit(redis_client, folder, b"".join(lines)).id, failing(3, 7, 20))
    made = retry(redis_client, folder, record)
    file, content = input_of(redis_client, folder, made)
    assert content == lines[2] + lines[6] + lines[19]
    assert (file.purpose, file.filename, file.bytes) == ("batch", f"{record.id}_retry.jsonl", len(content))
    again = run_to_end(redis_client, made.id, failing(1, 3))
    assert (again.state, again.completed, again.failed) == ("completed", 1, 2)
    twice = retry(redis_client, folder, again)
    assert input_of(redis_client, folder, twice)[1] == lines[2] + lines[19]
    last = run_to_end(redis_client, twice.id)
    with pytest.raises(BatchRefused, match=f"Every request of the batch {last.id} was answered"):
        retry(redis_client, folder, last)


@pytest.mark.parametrize("failed", [(1, 3), (3, 5), (5, 6), (1, 3, 5, 6)])
def test_lines_are_copied_byte_by_byte(redis_client: redis.Redis, folder: PurePath, failed: tuple[int, ...]) -> None:
    """But a last line without a line feed gets one; of a file without an answer all is copied."""
    record = submit(redis_client, folder, b"\xef\xbb\xbf" + b"".join(ODD))
    made = retry(redis_client, folder, run_to_end(redis_client, record.id, failing(*failed)))
    chosen = b"".join(ODD[number - 1].rstrip(b"\n") + b"\n" for number in failed)
    whole = b"\xef\xbb\xbf" + b"".join(ODD)
    assert input_of(redis_client, folder, made)[1] == (whole if len(failed) == 4 else chosen)
    assert run_to_end(redis_client, made.id).completed == len(failed)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("failed", [(3, 4), (1, 2, 3, 4)])
def test_lines_of_packed_files_become_jsonl(
    redis_client: redis.Redis, folder: PurePath, tmp_path: Path, suffix: str, failed: tuple[int, ...]
) -> None:
    """But the whole of a file stays as it is."""
    lines = lines_of(4).splitlines(keepends=True)
    data = packed(suffix, tmp_path)
    record = submit(redis_client, folder, data, f"in{suffix}")
    ended = run_to_end(redis_client, record.id, failing(*failed))
    made = retry(redis_client, folder, ended)
    file, content = input_of(redis_client, folder, made)
    if len(failed) == 4:
        assert (file.suffix, content) == (suffix, data)
    else:
        assert file.suffix == ".jsonl"
        assert [json.loads(line) for line in content.splitlines()] == [
            json.loads(lines[number - 1]) for number in failed
        ]
        assert suffix == ".parquet" or content == lines[2] + lines[3]
    content_path = store_of(redis_client, folder).content_path(file)
    assert list_names(str(content_path.parent)) == [content_path.name, "record.json"]
    assert run_to_end(redis_client, made.id).completed == len(failed)


def packed(suffix: str, folder: Path) -> bytes:
    data = lines_of(4)
    if suffix == ".jsonl.gz":
        return gzip.compress(data)
    if suffix == ".jsonl.zst":
        return pyarrow.compress(data, "zstd", asbytes=True)
    rows = [json.loads(line) for line in data.splitlines()]
    columns = {
        "custom_id": [row["custom_id"] for row in rows],
        "method": ["POST"] * 4,
        "url": [row["url"] for row in rows],
        "body": [json.dumps(row["body"]) for row in rows],
    }
    parquet.write_table(pyarrow.table(columns), folder / "in.parquet")
    return (folder / "in.parquet").read_bytes()


def test_lines_of_a_cancelled_batch_that_never_ran_are_among_them(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder, 20, done=8)
    cancel_batch(redis_client, record.id)
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.completed + ended.failed) == ("cancelled", 20)
    made = retry(redis_client, folder, ended)
    again = run_to_end(redis_client, made.id)
    assert (again.state, again.completed) == ("completed", 20 - ended.completed)
    answered = {json.loads(line)["custom_id"] for line in outputs(redis_client, folder, ended, again)}
    assert answered == {f"c{number}" for number in range(1, 21)}


def outputs(client: redis.Redis, folder: PurePath, *records: BatchRecord) -> list[bytes]:
    assert all(record.output for record in records)
    lines = [line for record in records for line in read_bytes(record.output or "").splitlines()]
    assert len(lines) == 20
    return lines


def test_a_batch_that_expired_is_retried(redis_client: redis.Redis, folder: PurePath) -> None:
    record = submit(redis_client, folder, lines_of(5))
    step(redis_client, record.id)
    answer_all(redis_client, most=2)
    redis_client.hset("{q}:batch:" + record.id, "expires_at", 1)
    tick(Ticker(Queue(redis_client)))
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.completed) == ("expired", 2)
    made = run_to_end(redis_client, retry(redis_client, folder, ended).id)
    check_every_line = input_of(redis_client, folder, made)[1].count(b"\n")
    assert (made.completed, check_every_line) == (3, 3)


def test_a_batch_that_was_cancelled_before_its_file_was_checked_is_retried_as_a_whole(
    redis_client: redis.Redis, folder: PurePath
) -> None:
    record = submit(redis_client, folder, lines_of(3))
    cancel_batch(redis_client, record.id)
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.total) == ("cancelled", 0)
    check_every_line_once(
        redis_client, folder, run_to_end(redis_client, retry(redis_client, folder, ended).id, failing(2)), 3
    )


def test_a_refused_batch_is_not_retried(redis_client: redis.Redis, folder: PurePath) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, b"{\n").id)
    with pytest.raises(BatchRefused, match="failed as a whole, as its errors say"):
        retry(redis_client, folder, record)


@pytest.mark.parametrize("kind", ["input", "error"])
def test_a_batch_whose_files_are_gone_is_not_retried(redis_client: redis.Redis, folder: PurePath, kind: str) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(3)).id, failing(2))
    store = store_of(redis_client, folder)
    gone = (record.spec.input_file_id if kind == "input" else record.error_file_id) or ""
    store.delete("", record.output_file_id or "")  # which is of no account
    before = listed(redis_client, folder)
    assert retry(redis_client, folder, record).state == "validating"
    store.delete("", gone)
    with pytest.raises(BatchRefused, match=f"The {kind} file {gone} of the batch {record.id} is gone"):
        retry(redis_client, folder, record)
    assert len(listed(redis_client, folder)) == len(before)


def test_the_new_file_expires_as_the_first_one_did(redis_client: redis.Redis, folder: PurePath) -> None:
    store = store_of(redis_client, folder)
    with store.begin(filename="in.jsonl", purpose="batch", tenant="", expires_seconds=7200) as upload:
        upload.write(lines_of(2))
        file_id = upload.commit().id
    serve(redis_client, "m")
    record = run_to_end(redis_client, submit_file(redis_client, folder, file_id).id, failing(2))
    file, _ = input_of(redis_client, folder, retry(redis_client, folder, record))
    assert file.expires_at == file.created_at + 7200


def test_a_retry_that_makes_no_batch_leaves_no_file(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(3)).id, failing(2))
    submit(redis_client, folder, lines_of(1))
    before = listed(redis_client, folder)
    with pytest.raises(TooManyBatches):
        retry(redis_client, folder, record, open_batches=1)

    def refuse(*_: object) -> None:
        raise StoreError("cannot write")

    with monkeypatch.context() as patch:
        patch.setattr(submit_module, "register", refuse)
        with pytest.raises(StoreError):
            retry(redis_client, folder, record)
    assert listed(redis_client, folder) == before
    assert stored(folder) == sorted(file.id for file in before)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_retry_whose_queue_goes_away_leaves_a_file_only_where_its_batch_may_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    with running_server(tmp_path / "redis") as server, connect(server.url) as client:
        record = run_to_end(client, submit(client, tmp_path, lines_of(3)).id, failing(2))
        files, batches = tmp_path / "store" / "files", tmp_path / "store" / "batches"
        known, copy, register = set(os.listdir(files)), retry_module._copy_unanswered, submit_module.register

        def copy_and_lose(*arguments: Any) -> FileRecord:
            file = copy(*arguments)
            server.stop()
            return file

        def lose_and_register(*arguments: Any) -> Any:
            server.stop()
            return register(*arguments)

        owner, name, lose = (
            (submit_module, "register", lose_and_register)
            if is_begun
            else (retry_module, "_copy_unanswered", copy_and_lose)
        )
        monkeypatch.setattr(owner, name, lose)
        queue = Queue(client, QueueSettings(redis_retry_seconds=0))
        new = BatchSubmission(input_file_id="", endpoint=CHAT, completion_window="24h", seconds=86400.0)
        with pytest.raises(QueueUnavailable):
            retry_batch(queue, FileStore(queue, str(tmp_path / "store"), forget_output), record, new)
    made = [load_manifest(str(one)) for one in batches.iterdir() if one.name != record.id]
    assert len(made) == is_begun
    assert set(os.listdir(files)) - known == {one.spec.input_file_id for one in made if one is not None}


def test_the_limit_of_open_batches_is_tested_before_lines_are_copied(
    redis_client: redis.Redis, folder: PurePath
) -> None:
    """Here of an input that is gone, which a copy would find first."""
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(3)).id, failing(2))
    submit(redis_client, folder, lines_of(1))
    store_of(redis_client, folder).delete("", record.spec.input_file_id or "")
    with pytest.raises(TooManyBatches):
        retry(redis_client, folder, record, open_batches=1)
    with pytest.raises(BatchRefused):
        retry(redis_client, folder, record, open_batches=2)


def test_the_limit_of_queued_tokens_is_tested_before_lines_are_copied(
    redis_client: redis.Redis, folder: PurePath
) -> None:
    """Here of an input that is gone, which a copy would find first."""
    asked = {"tenant": "t", "queued_tokens": 10_000}
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(40), **asked).id, failing(*range(1, 11)))
    tokens = Queue(redis_client).batch_fields(record.id).queued_tokens
    other = submit(redis_client, folder, lines_of(40), **asked)
    assert step(redis_client, other.id).state == "in_progress"
    store_of(redis_client, folder).delete("t", record.spec.input_file_id or "")
    share = tokens // 4
    assert share > 40
    with pytest.raises(ApiError, match=f"{tokens} in batches that have not ended are more than the") as caught:
        retry(redis_client, folder, record, tenant="t", queued_tokens=tokens + share - 1)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    for most in (tokens + share + 1, None):
        with pytest.raises(BatchRefused, match="input file"):
            retry(redis_client, folder, record, tenant="t", queued_tokens=most)
    failed = run_to_end(redis_client, submit(redis_client, folder, lines_of(40), tenant="t", queued_tokens=1).id)
    with pytest.raises(BatchRefused, match="failed as a whole"):
        retry(redis_client, folder, failed, tenant="t", queued_tokens=1)
    run_to_end(redis_client, other.id)
    with pytest.raises(BatchRefused, match="input file"):
        retry(redis_client, folder, record, tenant="t", queued_tokens=1)


def test_a_batch_without_an_answer_is_retried_with_all_its_tokens(redis_client: redis.Redis, folder: PurePath) -> None:
    asked = {"tenant": "t", "queued_tokens": 10_000}
    record = submit(redis_client, folder, lines_of(4), **asked)
    assert step(redis_client, record.id).state == "in_progress"
    cancel_batch(redis_client, record.id)
    ended = run_to_end(redis_client, record.id)
    tokens = Queue(redis_client).batch_fields(record.id).queued_tokens
    step(redis_client, submit(redis_client, folder, lines_of(4), **asked).id)
    with pytest.raises(ApiError, match=f"About {tokens} tokens in the lines to retry and {tokens} in"):
        retry(redis_client, folder, ended, tenant="t", queued_tokens=2 * tokens - 1)
    assert retry(redis_client, folder, ended, tenant="t", queued_tokens=2 * tokens).state == "validating"


def test_a_packed_input_that_cannot_be_read_any_more_is_refused(redis_client: redis.Redis, folder: PurePath) -> None:
    data = gzip.compress(lines_of(3))
    record = run_to_end(redis_client, submit(redis_client, folder, data, "in.jsonl.gz").id, failing(2))
    file, _ = input_of(redis_client, folder, record)
    content = store_of(redis_client, folder).content_path(file)
    content.unlink()
    content.write_bytes(data[:-12])
    with pytest.raises(BatchRefused, match=r"gzip|compressed|cut|damaged|end"):
        retry(redis_client, folder, record)
    assert stored(folder) == sorted(one.id for one in listed(redis_client, folder))


@pytest.mark.proof
@BUCKET_IN_PROOF
def test_a_retry_that_is_killed_at_any_step_leaves_no_half_file_and_no_batch_without_its_file(
    redis_client: redis.Redis, redis_url: str, folder: PurePath
) -> None:
    lines = lines_of(4).splitlines(keepends=True)
    record = run_to_end(redis_client, submit(redis_client, folder, b"".join(lines)).id, failing(2, 3))
    store, known = store_of(redis_client, folder), {file.id for file in listed(redis_client, folder)}
    leader = Ticker(Queue(redis_client), str(folder / "store"))

    *_, steps = ended_before_each_step(
        redis_client, redis_url, str(folder), lambda client: retry(client, folder, record)
    )
    assert steps > 15
    redis_client.flushall()
    submit(redis_client, folder, lines_of(1))  # which serves the model again
    tick(leader)
    store.sweep(time.time() + 2 * 24 * 3600 - 60)  # of uploads that were cut off; no file expires by then
    files = {file.id: file for file in listed(redis_client, folder)}
    assert set(stored(folder)) == set(files)
    for file_id in files.keys() - known:
        content = store.content_path(files[file_id]).read_bytes()
        assert content in (lines[1] + lines[2], lines_of(1))
    made = list_batches(Queue(redis_client), "", None, 1000).items
    assert len(made) >= 3
    for batch in made:
        assert batch.spec.input_file_id in files
        assert run_to_end(redis_client, batch.id).state == "completed" or batch.id == record.id
    assert get_batch(redis_client, made[0].id).ended


@pytest.mark.proof
@LOCAL  # a bucket's server is of this process
def test_a_retry_holds_little_of_a_large_file(redis_client: redis.Redis, folder: PurePath) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(3)).id, failing(2))
    file, _ = input_of(redis_client, folder, record)
    content = store_of(redis_client, folder).content_path(file)
    content.write_bytes(lines_of(100_000))
    output = Path(record.error_output or "")
    line = json.loads(output.read_bytes())
    with output.open("wb") as errors:
        for number in range(2, 100_001, 2):
            errors.write(json.dumps(line | {"id": f"batch_req_x_{number}"}).encode() + b"\n")
    tracemalloc.start()
    made = retry(redis_client, folder, record)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert input_of(redis_client, folder, made)[1].count(b"\n") == 50_000
    assert most < 4_000_000  # the lines take 7 MB


def test_a_file_stored_under_a_suffix_that_it_does_not_have_is_retried(
    redis_client: redis.Redis, folder: PurePath
) -> None:
    """As a version stored it that looked at names only."""
    serve(redis_client, "m")
    store = store_of(redis_client, folder)
    for failed in ((2,), (1, 2, 3)):
        file = store.get("", put(store, lines_of(3)))
        store.content_path(file).write_bytes(gzip.compress(lines_of(3)))
        record = run_to_end(redis_client, submit_file(redis_client, folder, file.id).id, failing(*failed))
        made = retry(redis_client, folder, record)
        assert input_of(redis_client, folder, made)[0].suffix == (".jsonl" if len(failed) == 1 else ".jsonl.gz")
        assert run_to_end(redis_client, made.id).completed == len(failed)
