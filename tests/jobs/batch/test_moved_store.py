"""A file store that was copied to another folder: its batches go on there, with an empty Redis, and
touch nothing of the folder that they came from.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import redis

from jobs.batch.client import cancel_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.rebuild import rebuild_all
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import run_to_end, step
from tests.support.control_plane import failing
from tests.support.store_batches import check_every_line_once, finished, lines_of, log_of, serve, submit, under_way


def contents(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing", "cancelling", "completed"])
def test_every_line_ends_once_in_the_new_folder(
    redis_client: redis.Redis, tmp_path: Path, state: str, gone: bool
) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    make = {"validating": lambda *at: submit(*at, lines_of(20)), "finalizing": finished, "completed": finished}
    record = make.get(state, under_way)(redis_client, before)
    if state == "cancelling":
        cancel_batch(redis_client, record.id)
    if state == "completed":
        record = run_to_end(redis_client, record.id)
    log = log_of(get_batch(redis_client, record.id))
    shutil.copytree(before, now)
    if gone:
        shutil.rmtree(before)
    left = contents(before)
    redis_client.flushall()
    serve(redis_client, "m")
    assert rebuild_all(Queue(redis_client), str(now / "store")) == (1, [])
    ended = get_batch(redis_client, record.id)
    if not ended.ended:
        ended = run_to_end(redis_client, record.id, failing(3))
    assert ended.state == ("cancelled" if state == "cancelling" else "completed")
    assert ended.output is None or Path(ended.output).is_relative_to(now)
    assert log_of(ended).startswith(log)
    check_every_line_once(redis_client, now, ended, 20)
    assert contents(before) == left


def test_lines_of_a_missing_part_run_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path / "before")
    shutil.move(tmp_path / "before", tmp_path / "now")
    [part] = (tmp_path / "now" / "store" / "batches").glob("*/parts/*")
    part.unlink()
    redis_client.flushall()
    serve(redis_client, "m")
    assert rebuild_all(Queue(redis_client), str(tmp_path / "now" / "store")) == (1, [])
    check_every_line_once(redis_client, tmp_path / "now", run_to_end(redis_client, record.id, failing(3)), 20)


def test_a_store_under_another_name_is_where_it_was(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = submit(redis_client, tmp_path / "real", lines_of(2))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    manifest = load_manifest(str(tmp_path / "link" / "store" / "batches" / record.id))
    assert manifest is not None
    assert manifest.spec == record.spec


@pytest.mark.parametrize("folder", ["", "/", "batch", "/batch", "batches/batch"])
def test_a_manifest_of_an_impossible_folder_is_named_and_the_others_are_rebuilt(
    redis_client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    damaged, other = (submit(redis_client, tmp_path, lines_of(2)) for _ in range(2))
    store = tmp_path / "store"
    path = store / "batches" / damaged.id / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["spec"]["root"] = folder
    path.write_text(json.dumps(manifest))
    redis_client.flushall()
    assert rebuild_all(Queue(redis_client), str(store)) == (1, [])
    assert f"{path} names {folder!r} as its folder" in caplog.text
    assert get_batch(redis_client, other.id).state == "validating"


@pytest.mark.parametrize("name", ["input.jsonl", "plan.bin"])
def test_a_missing_file_is_named_and_the_batch_goes_on_once_it_is_there(
    redis_client: redis.Redis, tmp_path: Path, name: str
) -> None:
    record = under_way(redis_client, tmp_path / "before")
    shutil.move(tmp_path / "before", tmp_path / "now")
    missing = tmp_path / "now" / "store" / "batches" / record.id / name
    missing.rename(tmp_path / "kept")
    redis_client.flushall()
    serve(redis_client, "m")
    assert rebuild_all(Queue(redis_client), str(tmp_path / "now" / "store")) == (1, [])
    problem = step(redis_client, record.id).problem
    assert problem is not None
    assert str(missing) in problem
    (tmp_path / "kept").rename(missing)
    check_every_line_once(redis_client, tmp_path / "now", run_to_end(redis_client, record.id, failing(3)), 20)
