"""The client's view: a batch is made once, taken up where it stopped, refused where it would mix
results, and always ends.
"""

import gzip
import json
import os
import threading
import time
from pathlib import Path

import pytest
import redis

from jobs.batch import client as client_module
from jobs.batch.client import (
    BatchRecord,
    BatchRefused,
    BatchSpec,
    Busy,
    InputChanged,
    cancel_batch,
    create_batch,
    get_batch,
)
from jobs.batch.manifest import load_manifest
from jobs.batch.rebuild import rebuild
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.storage import StoreError, exclusive
from tests.support.batch_steps import answer_all, begin, list_batches, run_to_end, step
from tests.support.control_plane import chat_line, check_echoes, failing, read_jsonl, write_input
from tests.support.kills import Killed
from tests.support.redis_server import running_server


def forget_all(client: redis.Redis) -> None:
    """The private server of the next start is empty."""
    client.flushall()


def answered_lines(client: redis.Redis, source: Path, **options: object) -> tuple[BatchRecord, list[int]]:
    """Runs (again) to the end; also returns the lines that a worker saw."""
    seen: list[int] = []
    record = run_to_end(
        client, begin(client, source, **options).id, lambda claim: seen.append(claim.key.line) or failing()(claim)
    )  # type: ignore[func-returns-value]
    return record, sorted(seen)


def test_a_new_batch_is_on_disk_and_in_redis(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    record = begin(redis_client, source, metadata={"a": "b"}, completion_window_seconds=3600.0)
    manifest = load_manifest(str(tmp_path / "out.parts"))
    assert manifest is not None
    assert (manifest.batch_id, manifest.state, manifest.spec) == (record.id, "validating", record.spec)
    assert record.id.startswith("batch_")
    assert (record.state, record.total, record.completed, record.failed, record.errors) == ("validating", 0, 0, 0, [])
    assert record.timestamps["expires"] == pytest.approx(record.timestamps["created"] + 3600)
    assert get_batch(redis_client, record.id) == record
    assert [found.id for found in list_batches(redis_client)] == [record.id]
    with pytest.raises(KeyError):
        get_batch(redis_client, "batch_unknown")


def test_counts_and_progress(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 10)).id
    step(redis_client, batch)
    step(redis_client, batch)
    Queue(redis_client).claim("w2", 1, 3, models=["m"])
    answer_all(redis_client, failing(9), most=4)
    record = get_batch(redis_client, batch)
    assert (record.total, record.completed + record.failed, record.running, record.waiting) == (10, 4, 3, 3)


def test_a_running_batch_is_found_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    first = begin(redis_client, source)
    step(redis_client, first.id)
    again = begin(redis_client, source)
    assert (again.id, again.state) == (first.id, "in_progress")
    assert len(list_batches(redis_client)) == 1


@pytest.mark.parametrize("emptied_after", ["register", "running_in"])
def test_a_batch_is_made_beside_a_redis_that_comes_back_empty(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied_after: str
) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    known = begin(redis_client, source).id
    if emptied_after == "register":
        forget_all(redis_client)
    done = getattr(client_module, emptied_after)

    def emptied(*args: object) -> object:
        result = done(*args)
        forget_all(redis_client)
        return result

    monkeypatch.setattr(client_module, emptied_after, emptied)
    made = begin(redis_client, source)
    assert (made.id, made.state) == (known, "validating")
    monkeypatch.undo()
    record = run_to_end(redis_client, begin(redis_client, source).id)
    assert (record.id, record.state, record.completed) == (known, "completed", 5)


def test_a_second_start_does_only_what_is_left(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 30)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, failing(*range(1, 30, 7)), most=20)
    step(redis_client, batch)
    done = {line for line in range(1, 31) if Queue(redis_client).done(batch)[line >> 3] & 0x80 >> (line & 7)}
    assert len(done) == 20
    forget_all(redis_client)
    record, seen = answered_lines(redis_client, source)
    assert set(seen) == set(range(1, 31)) - done
    assert record.id == batch
    assert record.completed + record.failed == 30
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "out.jsonl")] == [f"c{n}" for n in range(1, 31)]


def test_an_ended_batch_is_known_for_some_days(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    batch = begin(redis_client, source).id
    name = "{q}:batch:" + batch
    assert redis_client.ttl(name) == -1
    run_to_end(redis_client, batch)
    assert 29 * 86400 < int(redis_client.ttl(name)) <= 30 * 86400  # type: ignore[arg-type]
    redis_client.delete(name)  # what an expiry does
    assert Queue(redis_client).batches() == []
    assert rebuild(Queue(redis_client), str(tmp_path / "out.parts"))
    assert int(redis_client.ttl(name)) > 0  # type: ignore[arg-type]
    assert begin(redis_client, source).id == batch
    assert redis_client.ttl(name) == -1


def test_a_finished_batch_is_not_run_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    run_to_end(redis_client, begin(redis_client, source).id, failing(4))
    first = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    for empty in (False, True):
        if empty:
            forget_all(redis_client)
        record, seen = answered_lines(redis_client, source)
        assert (record.state, record.completed, record.failed, seen) == ("completed", 9, 1, [])
        assert (tmp_path / "out.jsonl").read_bytes() == first


@pytest.mark.parametrize(("retry_failed", "expected"), [(False, [5]), (True, [2, 5])])
def test_which_failures_run_again(
    redis_client: redis.Redis, tmp_path: Path, retry_failed: bool, expected: list[int]
) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)

    def mixed(claim):  # type: ignore[no-untyped-def]
        return failing(5, status=500)(claim) if claim.key.line == 5 else failing(2)(claim)

    assert run_to_end(redis_client, begin(redis_client, source).id, mixed).failed == 2
    forget_all(redis_client)
    record, seen = answered_lines(redis_client, source, retry_failed=retry_failed)
    assert seen == expected
    assert (record.completed, record.failed) == (10 - (not retry_failed), int(not retry_failed))
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "out.jsonl")] == [f"c{n}" for n in range(1, 11)]


def test_a_changed_input_is_refused_and_what_is_there_stays(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    run_to_end(redis_client, begin(redis_client, source).id)
    forget_all(redis_client)
    data = source.read_bytes()
    source.write_bytes(data.replace(b"say 3", b"say 4"))
    with pytest.raises(InputChanged, match=r"in\.jsonl has changed since .*out\.parts was begun"):
        begin(redis_client, source)
    source.write_bytes(data + chat_line("more"))
    with pytest.raises(InputChanged):
        begin(redis_client, source)
    check_echoes(tmp_path / "out.jsonl", 10)
    source.write_bytes(data)
    assert answered_lines(redis_client, source)[1] == []


@pytest.mark.parametrize("option", [{"default_model": "m"}, {"seed": 3}, {"endpoint": "/v1/chat/completions"}])
def test_changed_settings_are_refused(redis_client: redis.Redis, tmp_path: Path, option: dict[str, object]) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    run_to_end(redis_client, begin(redis_client, source).id)
    with pytest.raises(InputChanged, match=f"was begun with {next(iter(option))}"):
        begin(redis_client, source, **option)


def test_a_refused_file_may_be_mended(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("c1", "say 1") + b"oops\n")
    assert step(redis_client, begin(redis_client, source).id).state == "failed"
    write_input(source, 2)
    record, seen = answered_lines(redis_client, source)
    assert (record.state, seen, record.errors) == ("completed", [1, 2], [])


def test_a_model_that_is_not_served_any_more_is_named(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=2)
    step(redis_client, batch)
    forget_all(redis_client)
    record = step(redis_client, begin(redis_client, source, models=("other",)).id)
    assert (record.state, record.errors[0].code) == ("failed", "model_not_found")
    forget_all(redis_client)
    assert len(answered_lines(redis_client, source)[1]) == 3


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "plan", "unlisted", "half-written"])
def test_torn_files_are_mended_and_never_trusted(redis_client: redis.Redis, tmp_path: Path, damage: str) -> None:
    source = write_input(tmp_path / "in.jsonl", 40)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=30)
    step(redis_client, batch)
    forget_all(redis_client)
    root = tmp_path / "out.parts"
    [part] = (root / "parts").iterdir()
    content = part.read_bytes()
    if damage == "cut":
        part.write_bytes(content[: len(content) * 2 // 3])
    elif damage == "flip":
        part.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    elif damage == "gone":
        part.unlink()
    elif damage == "plan":
        (root / "plan.bin").write_bytes(b"\0" * 100)
    elif damage == "unlisted":
        (part.with_name("000009-1")).write_bytes(content[: len(content) // 2])
    else:
        (root / ".manifest.json.77.tmp").write_bytes(b"{")
    record, seen = answered_lines(redis_client, source)
    kept = 40 - len(seen)
    assert kept == {"gone": 0}.get(damage, kept)
    assert kept == 30 if damage in ("plan", "unlisted", "half-written") else kept < 30
    assert damage != "cut" or kept > 15
    assert record.completed == 40
    check_echoes(tmp_path / "out.jsonl", 40)
    assert not list(root.glob(".*.tmp"))


def test_a_spool_that_was_damaged_is_made_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    plain = write_input(tmp_path / "plain.jsonl", 40).read_bytes()
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(plain))
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=10)
    step(redis_client, batch)
    forget_all(redis_client)
    spool = tmp_path / "out.parts" / "lines.jsonl"
    spool.write_bytes(plain.replace(b'"say 40"', b'"say 41"'))
    assert answered_lines(redis_client, source)[0].completed == 40
    check_echoes(tmp_path / "out.jsonl", 40)


def test_a_broken_manifest_is_named(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 1)
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match=r"manifest\.json is not a batch manifest"):
        begin(redis_client, source)


def test_what_cannot_work_is_refused_at_once(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 1)
    for changes, reason in (
        ({"output": str(tmp_path)}, "is a folder"),
        ({"output": str(source)}, "is the input itself"),
        ({"output": str(source / "out.jsonl")}, "cannot make the folder"),
        ({"output": str(tmp_path / "out.parquet.gz")}, "cannot be compressed"),
        ({"output": "/proc/out.jsonl"}, "cannot write /proc/out.jsonl"),
    ):
        with pytest.raises(BatchRefused, match=reason):
            begin(redis_client, source, **changes)
    with pytest.raises(BatchRefused, match="there is no file"):
        begin(redis_client, tmp_path / "absent.jsonl")
    assert list_batches(redis_client) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_input_without_permission_is_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 1)
    source.chmod(0)
    with pytest.raises(BatchRefused, match="Permission denied"):
        begin(redis_client, source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 1)
    tmp_path.chmod(0o500)
    with pytest.raises(BatchRefused, match="Permission denied"):
        begin(redis_client, source)


def test_two_starts_at_once_make_one_batch(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    spec = BatchSpec(input=str(source), root=str(tmp_path / "out.parts"), models=("m",))
    threads = [threading.Thread(target=create_batch, args=(redis_client, spec)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list_batches(redis_client)) == 1


def test_a_folder_in_use_is_named(redis_client: redis.Redis, tmp_path: Path) -> None:
    with (
        exclusive(str(tmp_path), 0),
        pytest.raises(Busy, match="is in use by another process"),
        exclusive(str(tmp_path), 0),
    ):
        raise AssertionError


def test_cancelling(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 3)).id
    assert cancel_batch(redis_client, batch).state == "cancelling"
    assert cancel_batch(redis_client, batch).state == "cancelling"
    record = run_to_end(redis_client, batch)
    assert (record.state, record.total, record.completed, record.failed) == ("cancelled", 0, 0, 0)
    assert cancel_batch(redis_client, batch) == record
    with pytest.raises(KeyError):
        cancel_batch(redis_client, "batch_unknown")


@pytest.mark.parametrize("step_of_it", ["remove_unfinished", "_command"])
@pytest.mark.parametrize("by", ["start", "rebuild"])
def test_a_kill_while_a_record_is_removed_delays_no_other(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_of_it: str, by: str
) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=4)
    step(redis_client, batch)
    real = getattr(Queue, step_of_it)

    def die(queue: Queue, *arguments: object) -> object:
        if step_of_it == "_command" and arguments[0] != "UNLINK":
            return real(queue, *arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Queue, step_of_it, die)
        with pytest.raises(Killed):
            Queue(redis_client).forget(batch)
    assert list_batches(redis_client) == []
    with pytest.raises(KeyError):
        get_batch(redis_client, batch)
    if by == "start":
        assert begin(redis_client, source).id == batch
    else:
        assert rebuild(Queue(redis_client), str(tmp_path / "out.parts"))
    assert run_to_end(redis_client, batch).completed == 10
    check_echoes(tmp_path / "out.jsonl", 10)


def test_a_control_plane_that_was_left_behind_writes_nothing(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=5)
    manifest = tmp_path / "out.parts" / "manifest.json"
    with running_server() as server:
        other = connect(server.url)
        assert begin(other, source).id == batch
        taken_over = manifest.read_bytes()
        for generation in range(1, 5):  # however often the old server's ticker revives it
            step(redis_client, batch)
            redis_client.hset("{q}:batch:" + batch, "generation", generation + 1)
        assert manifest.read_bytes() == taken_over
        assert run_to_end(other, batch).completed == 10
        other.close()
    check_echoes(tmp_path / "out.jsonl", 10)


def test_the_completion_window_counts_by_the_clock_of_redis(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    record = begin(redis_client, write_input(tmp_path / "in.jsonl", 1), completion_window_seconds=60.0)
    assert record.timestamps["expires"] == pytest.approx(now + 60, abs=20)


def test_the_caller_decides_how_long_a_look_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(f"unix://{tmp_path}/missing.sock")
    started = time.monotonic()
    with pytest.raises(QueueUnavailable):
        get_batch(client, "batch_x", retry_seconds=0)
    usual = QueueSettings().redis_retry_seconds
    monkeypatch.setenv("REDIS_RETRY_SECONDS", "0.1")
    with pytest.raises(QueueUnavailable):
        get_batch(client, "batch_x")
    assert time.monotonic() - started < usual


def test_the_manifest_is_plain_json(redis_client: redis.Redis, tmp_path: Path) -> None:
    run_to_end(redis_client, begin(redis_client, write_input(tmp_path / "in.jsonl", 3)).id)
    manifest = json.loads((tmp_path / "out.parts" / "manifest.json").read_text())
    assert manifest["state"] == "completed"
    assert (manifest["total"], manifest["completed"], manifest["failed"]) == (3, 3, 0)
    assert len(manifest["input_sha256"]) == 64
    assert [sorted(part) for part in manifest["parts"]] == [["bytes", "lines", "name", "sha256"]]
