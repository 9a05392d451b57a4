"""The completion log: each success once, in an order that never changes, whatever is killed while
it is written.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch import completion_log, log_segments, result_files
from jobs.batch.client import BatchRecord, get_batch
from jobs.batch.completion_log import (
    INDEX_NAME,
    LOG_NAME,
    Entry,
    Extent,
    append_log,
    logged_lines,
    read_log,
    remove_log,
    sound_extent,
)
from jobs.control import advance, finalize, slices
from jobs.control.ticker import Ticker
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileStore
from jobs.store.storage import StoreError
from tests.support.batch_steps import answer_all, run_to_end, step
from tests.support.control_plane import failing
from tests.support.kills import Killed, killed_at
from tests.support.object_stores import bucket
from tests.support.store_batches import content_of, lines_of, log_of, manifest_of, store_of, submit


def joined(root: Path, extent: Extent, offset: int, limit: int | None = None) -> tuple[bytes, int]:
    pieces, last = read_log(str(root), extent, offset, limit)
    return b"".join(pieces), last


def no_room(location: str, data: bytes, unchanging: bool) -> None:
    raise StoreError(f"cannot write {location}: no room")


def test_an_append_in_a_bucket_is_read_from_any_position_and_raises_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_segments, "_SEGMENT_LINES", 15)
    lines = [(number, b"%d" % number) for number in range(1, 101)]
    with bucket() as place:
        root = f"{place.uri}/batch_a"
        extent = append_log(root, append_log(root, Extent(), []), (Entry(*line) for line in lines))
        assert (extent.lines, [one.lines for one in extent.segments]) == (100, [15] * 6 + [10])
        assert logged_lines(root, 0, 100, extent.segments) == [number for number, _ in lines]
        for offset, last in [(0, 100), (14, 16), (15, 45), (99, 100)]:
            pieces, _ = read_log(root, extent, offset, last - offset)
            assert b"".join(pieces) == b"".join(text + b"\n" for _, text in lines[offset:last])
        monkeypatch.setattr(log_segments, "write_bytes", no_room)
        with pytest.raises(StoreError, match="no room"):
            append_log(root, extent, (Entry(*line) for line in lines))


def test_what_was_appended_is_read_from_any_position(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [(number, b"x" * rng.randrange(300) + b"%d" % number) for number in rng.sample(range(1, 1000), 200)]
    extent = Extent()
    for start in range(0, 200, 40):
        extent = append_log(str(tmp_path), extent, [Entry(*line) for line in lines[start : start + 40]])
    assert extent.lines == 200
    assert logged_lines(str(tmp_path), 0, 200) == [number for number, _ in lines]
    for _ in range(50):
        offset, limit = rng.randrange(201), rng.randrange(1, 250)
        wanted = b"".join(text + b"\n" for _, text in lines[offset : offset + limit])
        assert joined(tmp_path, extent, offset, limit) == (wanted, min(offset + limit, 200)), seed
    assert joined(tmp_path, extent, 0)[1] == 200
    assert joined(tmp_path, extent, 900) == (b"", 200)


def test_what_a_killed_append_left_is_not_read_and_cut_off(tmp_path: Path) -> None:
    first = append_log(str(tmp_path), Extent(), [Entry(1, b"one"), Entry(2, b"two")])
    append_log(str(tmp_path), first, [Entry(3, b"three, which no manifest ever counted")])
    assert joined(tmp_path, first, 0) == (b"one\ntwo\n", 2)
    second = append_log(str(tmp_path), first, [Entry(4, b"four")])
    assert joined(tmp_path, second, 1) == (b"two\nfour\n", 3)
    assert (tmp_path / LOG_NAME).stat().st_size == second.bytes
    assert logged_lines(str(tmp_path), 0, 3) == [1, 2, 4]


@pytest.mark.parametrize(("cut", "left"), [("log", 1), ("index", 1), ("both", 0)])
def test_a_log_that_was_damaged_goes_on_with_what_is_left(tmp_path: Path, cut: str, left: int) -> None:
    extent = append_log(str(tmp_path), Extent(), [Entry(1, b"one"), Entry(2, b"two"), Entry(3, b"three")])
    if cut == "log":
        (tmp_path / LOG_NAME).write_bytes((tmp_path / LOG_NAME).read_bytes()[:-2])
        left = 2
    elif cut == "index":
        (tmp_path / INDEX_NAME).write_bytes((tmp_path / INDEX_NAME).read_bytes()[:-15])
        left = 0
    else:
        remove_log(str(tmp_path))
    with pytest.raises(StoreError):
        append_log(str(tmp_path), extent, [Entry(4, b"four")])
    if cut != "log":
        with pytest.raises(StoreError):
            joined(tmp_path, extent, 2)
    sound = sound_extent(str(tmp_path), extent)
    assert sound.lines == left
    assert joined(tmp_path, append_log(str(tmp_path), sound, [Entry(4, b"four")]), left)[0] == b"four\n"


@pytest.mark.parametrize(
    "point", ["write_part", "put", "append_log", "_append", "save_manifest", "drained", "progress_fields"]
)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_a_drain_killed_anywhere_logs_each_success_once(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    after: bool,
    nth: int,
) -> None:
    record = submit(redis_client, tmp_path, lines_of(40))
    batch = record.id
    step(redis_client, batch)
    step(redis_client, batch)
    answer = failing(3, 17, 30)
    for _ in range(nth - 1):
        answer_all(redis_client, answer, most=10)
        drain(redis_client, batch)
    seen = log_of(record)
    owners = {"drained": Queue, "put": FileStore, "append_log": result_files, "_append": completion_log}
    owner: Any = owners.get(point, advance)
    real = getattr(owner, point)

    def die(*arguments: Any, **options: Any) -> Any:
        if after:
            real(*arguments, **options)
        raise Killed

    answer_all(redis_client, answer, most=10)
    with monkeypatch.context() as patch:
        patch.setattr(owner, point, die)
        if point == "put" and nth == 2:
            drain(redis_client, batch)  # the file is known since the first success
        else:
            with pytest.raises(Killed):
                drain(redis_client, batch)
    assert log_of(record).startswith(seen)
    seen = log_of(record)
    drain(redis_client, batch)
    assert log_of(record).startswith(seen)
    ended = run_to_end(redis_client, batch, answer)
    assert (ended.completed, ended.failed, ended.stored_completed, ended.stored_failed) == (37, 3, 37, 3)
    logged = log_of(record)
    assert logged.startswith(seen)
    output = content_of(redis_client, tmp_path, ended.output_file_id)
    assert sorted(logged.splitlines()) == sorted(output.splitlines())
    assert manifest_of(record).logged_lines == 37


def drain(client: redis.Redis, batch: str) -> BatchRecord:
    """A slice of a process that knows nothing of the batch."""
    advance._progress.clear()
    return step(client, batch)


def test_results_that_come_again_are_not_logged_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    """What a Redis does that was brought back from an append-only file without its last second."""
    record = submit(redis_client, tmp_path, lines_of(20))
    batch = record.id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=10)
    names = ["{q}:results:" + batch, "{q}:parts:" + batch]
    results = redis_client.hgetall(names[0])
    size = redis_client.hget("{q}:batch:" + batch, "result_bytes")
    step(redis_client, batch)
    redis_client.delete(names[1])
    redis_client.hset(names[0], mapping=results)  # type: ignore[arg-type]
    redis_client.hset("{q}:batch:" + batch, "result_bytes", size)  # type: ignore[arg-type]
    again = step(redis_client, batch)
    assert (again.stored_completed, again.usage.prompt_tokens) == (10, 70)
    assert again.usage.device_microseconds == 2_500_000
    ended = run_to_end(redis_client, batch)
    assert (ended.state, ended.completed) == ("completed", 20)
    custom_ids = [json.loads(line)["custom_id"] for line in log_of(record).splitlines()]
    assert sorted(custom_ids) == sorted(f"c{number}" for number in range(1, 21))


def test_the_output_file_can_be_found_from_the_first_success_on(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = submit(redis_client, tmp_path, lines_of(10), tenant="t")
    step(redis_client, record.id)
    step(redis_client, record.id)
    answer_all(redis_client, failing(*range(1, 11)), most=3)
    assert drain(redis_client, record.id).output_file_id is None
    answer_all(redis_client, most=1)
    running = drain(redis_client, record.id)
    assert running.output_file_id == record.spec.output_file_id
    found = store_of(redis_client, tmp_path).get("t", running.output_file_id or "")
    assert (found.complete, found.batch_id, found.expires_at) == (False, record.id, None)
    with pytest.raises(KeyError):
        store_of(redis_client, tmp_path).get("", found.id)
    ended = run_to_end(redis_client, record.id)
    found = store_of(redis_client, tmp_path).get("t", ended.output_file_id or "")
    assert (found.complete, found.bytes) == (True, len(content_of(redis_client, tmp_path, ended.output_file_id, "t")))
    assert found.filename == f"{record.id}_output.jsonl"


def drained_at_once(client: redis.Redis, folder: Path) -> BatchRecord:
    record = submit(client, folder, lines_of(10))
    step(client, record.id)
    answer_all(client, failing(3))
    record = step(client, record.id)
    assert (record.state, record.stored_completed, record.output_file_id) == ("finalizing", 9, None)
    return record


@pytest.mark.parametrize(
    "point", ["log_output", "adopt_log", "link", "_append", "publish_result_files", "save_manifest", "clean_up"]
)
@pytest.mark.parametrize("after", [False, True])
def test_the_output_of_lines_that_were_drained_at_once_is_their_log(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, after: bool
) -> None:
    record = drained_at_once(redis_client, tmp_path)
    owners = {"log_output": finalize, "publish_result_files": finalize, "adopt_log": result_files}
    owner: Any = owners.get(point, completion_log if point in ("link", "_append") else slices)
    with killed_at(monkeypatch, owner, point, after):
        step(redis_client, record.id)
    if point == "clean_up":
        Ticker(Queue(redis_client)).tick()
    ended = get_batch(redis_client, record.id) if point == "clean_up" else run_to_end(redis_client, record.id)
    output = content_of(redis_client, tmp_path, ended.output_file_id)
    assert (ended.completed, ended.failed, len(output.splitlines())) == (9, 1, 9)
    assert log_of(ended) == output
    assert log_of(ended, 2, 3) == b"".join(output.splitlines(keepends=True)[2:5])
    root = ended.spec.root
    assert logged_lines(root, 0, 9) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    store_of(redis_client, tmp_path).delete("", str(ended.output_file_id))
    assert not Path(root, LOG_NAME).exists()


@pytest.mark.parametrize("killed", [False, True])
def test_lines_that_were_drained_at_once_and_broke_on_disk(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The log then has those that run again, and those that did not break; the output that was
    its other name stays as it was.
    """
    record = drained_at_once(redis_client, tmp_path)
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(slices, "save_manifest", raise_killed)
            with pytest.raises(Killed):
                step(redis_client, record.id)
    [part] = Path(record.spec.root, "parts").iterdir()
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    assert step(redis_client, record.id).state == "in_progress"
    published = store_of(redis_client, tmp_path).folder(str(record.spec.output_file_id)) / "content.jsonl"
    before = published.read_bytes() if killed else b""
    step(redis_client, record.id)
    answer_all(redis_client, most=2)
    step(redis_client, record.id)
    assert not killed or published.read_bytes() == before
    seen = log_of(record)
    assert len(seen.splitlines()) == manifest_of(record).completed
    ended = run_to_end(redis_client, record.id)
    assert log_of(ended).startswith(seen)
    output = content_of(redis_client, tmp_path, ended.output_file_id)
    assert sorted(log_of(ended).splitlines()) == sorted(output.splitlines())
    assert ended.completed + ended.failed == 10


def raise_killed(*arguments: Any) -> None:
    raise Killed
