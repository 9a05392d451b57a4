"""How batches of the API end: killed, cancelled, expired, rebuilt; every line in one of two files,
and nothing left behind.
"""

import json
import os
import re
from pathlib import Path, PurePath
from typing import Any

import pytest
import redis

from jobs.batch import ending
from jobs.batch.client import cancel_batch, get_batch, list_batches
from jobs.batch.rebuild import rebuild_all
from jobs.batch.retention import remove_ended
from jobs.control import finalize, line_results, slices
from jobs.control.ticker import Ticker
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileStore
from jobs.store.storage import AtomicWriter, StoreError, exists, is_local, make_folder, write_bytes
from tests.support.batch_steps import run_to_end, step, tick
from tests.support.control_plane import failing
from tests.support.kills import killed_at
from tests.support.object_stores import files_below
from tests.support.store_batches import (
    check_every_line_once,
    content_of,
    finished,
    lines_of,
    log_of,
    manifest_of,
    serve,
    store_of,
    submit,
    under_way,
)

MONTH = 30 * 24 * 3600


@pytest.mark.parametrize(("failures", "files"), [((), (True, False)), ((1, 2), (False, True))])
def test_a_file_without_lines_is_not_made(
    redis_client: redis.Redis, folder: PurePath, failures: tuple[int, ...], files: tuple[bool, bool]
) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(2)).id, failing(*failures))
    assert (record.state, record.output_file_id is not None, record.error_file_id is not None) == ("completed", *files)
    assert len(list((folder / "store" / "files").iterdir())) == 2  # the input's and the one
    check_every_line_once(redis_client, folder, record, 2)


def test_what_an_ended_batch_needs_no_more_is_gone(redis_client: redis.Redis, folder: PurePath) -> None:
    ended = run_to_end(redis_client, finished(redis_client, folder).id)
    kept = {re.sub("-[0-9a-f]{8}", "", name) for name in files_below(ended.spec.root)}
    log = {".lock", "lines.index", "completed.jsonl", "completed.index"}
    in_a_bucket = {"made/lines.index", "log/000000000"}
    assert kept == {"manifest.json", "input.jsonl", *(log if is_local(ended.spec.root) else in_a_bucket)}
    assert Queue(redis_client).open_batches("") == []


def test_a_small_batch_waits_for_the_disk_no_more_often_than_its_promises_need(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(handle) or fsync(handle))
    ended = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(10)).id)
    assert (ended.completed, ended.failed) == (10, 0)
    assert len(synced) <= 35  # 9 of them for the store and the upload


@pytest.mark.parametrize("seconds", [None, 7200])
def test_results_expire(redis_client: redis.Redis, folder: PurePath, seconds: int | None) -> None:
    ended = run_to_end(redis_client, finished(redis_client, folder, output_expires_seconds=seconds).id)
    for file_id in (ended.output_file_id, ended.error_file_id):
        found = store_of(redis_client, folder).get("", file_id or "")
        assert found.expires_at is not None
        assert found.expires_at - found.created_at == (seconds or MONTH)
        assert abs(found.created_at - ended.timestamps["completed"]) < 30


@pytest.mark.proof
@pytest.mark.parametrize(
    "point", ["open_output", "write_outputs", "commit", "put", "drop", "save_manifest", "transition", "tidy"]
)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("emptied", [False, True])
def test_finalize_killed_anywhere_writes_the_same(
    redis_client: redis.Redis,
    folder: PurePath,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    after: bool,
    emptied: bool,
) -> None:
    failures = () if point == "drop" else (3,)  # which is for a file without lines
    record = finished(redis_client, folder, failures)
    owners = {
        "open_output": line_results,
        "write_outputs": finalize,
        "commit": finalize.LineWriter,
        "put": FileStore,
        "drop": FileStore,
        "transition": Queue,
        "tidy": ending,
    }
    owner: Any = owners.get(point, slices)
    with killed_at(
        monkeypatch, owner, point, after, lambda arguments: point != "transition" or "completed" in arguments
    ):
        step(redis_client, record.id)
    if emptied:
        redis_client.flushall()
        serve(redis_client, "m")
        files = store_of(redis_client, folder)
        files.reindex(files.names())
        rebuild_all(Queue(redis_client), str(folder / "store"))
    tick(Ticker(Queue(redis_client)))
    ended = get_batch(redis_client, record.id)
    if Queue(redis_client).batch_fields(record.id).state not in END_STATES:
        ended = run_to_end(redis_client, record.id, failing())
    assert (ended.state, ended.failed) == ("completed", len(failures))
    check_every_line_once(redis_client, folder, ended, 20)
    written = {name.rpartition("/")[2] for name in files_below(str(folder / "store" / "files"))}
    if is_local(str(folder)):
        assert written == {"record.json", "content.jsonl"}
    else:
        assert "record.json" in written
        assert all(name.startswith("content") for name in written - {"record.json"})
    assert not any(name.endswith("plan.bin") for name in files_below(ended.spec.root))


def test_cancelled_while_it_runs(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    claims = Queue(redis_client).claim("w2", 1, 4, models=["m"])
    assert cancel_batch(redis_client, record.id).state == "cancelling"
    held = [(claim.key, claim.fence) for claim in claims]
    assert len(Queue(redis_client).renew("w2", held)) == 4
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.completed, ended.failed) == ("cancelled", 7, 13)
    check_every_line_once(redis_client, folder, ended, 20)
    errors = [
        json.loads(line)["error"]["code"] for line in content_of(redis_client, folder, ended.error_file_id).splitlines()
    ]
    assert sorted(errors) == ["bad_luck"] + ["batch_cancelled"] * 12
    assert cancel_batch(redis_client, record.id) == ended


@pytest.mark.proof
@pytest.mark.parametrize("outcome", ["completed", "expired"])
@pytest.mark.parametrize("point", ["write_outputs", "publish_result_files", "record", "move"])
def test_cancelled_while_its_results_are_written(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, outcome: str, point: str
) -> None:
    if outcome == "completed":
        record = finished(redis_client, folder)
    else:
        record = under_way(redis_client, folder)
        redis_client.hset("{q}:batch:" + record.id, "expires_at", 1)
        tick(Ticker(Queue(redis_client)))
    owner: Any = {"record": slices.Slice, "move": slices}.get(point, finalize)
    real = getattr(owner, name := "save_manifest" if point == "move" else point)

    def cancel_first(*arguments: Any, **options: Any) -> Any:
        if point != "record" or get_batch(redis_client, record.id).state == "finalizing":
            monkeypatch.setattr(owner, name, real)
            assert cancel_batch(redis_client, record.id).state == "cancelling"
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, cancel_first)
    step(redis_client, record.id)  # the slice that is overtaken
    assert get_batch(redis_client, record.id).state == "cancelling"
    ended = run_to_end(redis_client, record.id)
    expected = ("cancelled", 19, 1) if outcome == "completed" else ("cancelled", 7, 13)
    assert (ended.state, ended.completed, ended.failed) == expected
    assert manifest_of(ended).state == "cancelled"
    check_every_line_once(redis_client, folder, ended, 20)


def test_a_window_that_closes(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder, seconds=3600.0)
    redis_client.hset("{q}:batch:" + record.id, "expires_at", 1)
    tick(Ticker(Queue(redis_client)))
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.completed, ended.failed) == ("expired", 7, 13)
    check_every_line_once(redis_client, folder, ended, 20)


def test_cancelled_and_expired_before_anything_was_known(redis_client: redis.Redis, folder: PurePath) -> None:
    first, second = (submit(redis_client, folder, lines_of(5)) for _ in range(2))
    cancel_batch(redis_client, first.id)
    redis_client.hset("{q}:batch:" + second.id, "expires_at", 1)
    tick(Ticker(Queue(redis_client)))
    for record, state in ((first, "cancelled"), (second, "expired")):
        ended = run_to_end(redis_client, record.id)
        assert (ended.state, ended.total, ended.completed, ended.failed) == (state, 0, 0, 0)
        assert (ended.output_file_id, ended.error_file_id) == (None, None)


@pytest.mark.parametrize("point", ["save_manifest", "_transition"])
def test_cancelled_at_the_moment_in_which_validation_ends(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The counts add up whether or not the plan came to be known."""
    record = submit(redis_client, folder, lines_of(5))
    owner: Any = slices if point == "save_manifest" else slices.Slice
    real = getattr(owner, point)

    def cancel_first(*arguments: Any, **options: Any) -> Any:
        if point == "save_manifest" or "in_progress" in arguments:
            monkeypatch.setattr(owner, point, real)
            cancel_batch(redis_client, record.id)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, point, cancel_first)
    step(redis_client, record.id)
    ended = run_to_end(redis_client, record.id)
    assert (ended.state, ended.completed) == ("cancelled", 0)
    assert (ended.total, ended.failed) in ((0, 0), (5, 5))
    if ended.total:
        check_every_line_once(redis_client, folder, ended, 5)


@pytest.mark.proof
@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing", "cancelling", "completed", "failed"])
def test_an_emptied_redis_gets_everything_back(redis_client: redis.Redis, folder: PurePath, state: str) -> None:
    if state == "failed":
        record = step(redis_client, submit(redis_client, folder, b"bad\n", tenant="t").id)
    elif state == "validating":
        record = submit(redis_client, folder, lines_of(20), tenant="t")
    else:
        make = under_way if state in ("in_progress", "cancelling") else finished
        record = make(redis_client, folder, tenant="t", metadata={"a": "b"})
        if state == "cancelling":
            cancel_batch(redis_client, record.id)
        if state == "completed":
            run_to_end(redis_client, record.id)
    before = get_batch(redis_client, record.id)
    log = log_of(before)
    redis_client.flushall()
    serve(redis_client, "m")
    rebuild_all(Queue(redis_client), str(folder / "store"))
    again = get_batch(redis_client, record.id)
    shown = (
        "spec",
        "models",
        "errors",
        "output_file_id",
        "error_file_id",
        "stored_completed",
        "stored_failed",
        "total",
        "usage",
    )
    assert [getattr(again, name) for name in shown] == [getattr(before, name) for name in shown]
    assert set(before.timestamps) <= {*again.timestamps, "cancelling"}
    assert [found.id for found in list_batches(Queue(redis_client), "t", None, 10).items] == [record.id]
    assert Queue(redis_client).open_batches("t") == ([] if before.ended else [record.id])
    if before.ended:
        assert again.state == before.state
        return
    ended = run_to_end(redis_client, record.id, failing(3))
    assert ended.state == ("cancelled" if state == "cancelling" else "completed")
    assert log_of(ended).startswith(log)
    check_every_line_once(redis_client, folder, ended, 20)


def test_batches_that_ended_long_ago_go_and_others_stay(redis_client: redis.Redis, folder: PurePath) -> None:
    old, young, running = (submit(redis_client, folder, lines_of(3)) for _ in range(3))
    run_to_end(redis_client, old.id)
    run_to_end(redis_client, young.id)
    queue = Queue(redis_client)
    unmade = str(folder / "store" / "batches" / f"batch_{'0' * 24}")
    make_folder(unmade)
    write_bytes(f"{unmade}/input.jsonl", b"")
    now = queue.now()
    manifest = manifest_of(young)
    manifest.timestamps["completed"] += 7200
    slices.save_manifest(manifest)
    assert remove_ended(queue, str(folder / "store"), now) == 1  # what never became a batch
    assert not exists(unmade)
    assert remove_ended(queue, str(folder / "store"), now + MONTH + 3600) == 1
    assert [found.id for found in list_batches(queue, "", None, 10).items] == [running.id, young.id]
    assert not exists(old.spec.root)
    with pytest.raises(KeyError):
        get_batch(redis_client, old.id)
    assert run_to_end(redis_client, running.id).completed == 3


def test_a_disk_that_is_full_when_results_are_written(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finished(redis_client, folder)

    def refuse(writer: AtomicWriter) -> None:
        raise StoreError("cannot write: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(AtomicWriter, "commit", refuse)
        stuck = step(redis_client, record.id)
        assert (stuck.state, stuck.problem) == ("finalizing", "cannot write: No space left on device")
    check_every_line_once(redis_client, folder, run_to_end(redis_client, record.id), 20)


def test_what_breaks_on_disk_runs_again_and_is_logged_once(redis_client: redis.Redis, tmp_path: Path) -> None:
    folder = tmp_path
    record = finished(redis_client, folder)
    seen = log_of(record)
    for part in (Path(record.spec.root) / "parts").iterdir():
        part.write_bytes(part.read_bytes()[:-100])
    assert step(redis_client, record.id).state == "in_progress"
    ended = run_to_end(redis_client, record.id, failing(3))
    assert log_of(ended).startswith(seen)
    check_every_line_once(redis_client, folder, ended, 20)
