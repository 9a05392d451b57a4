"""A slice feeds what fits, drains what is finished, and may die anywhere without losing or doubling
a line.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.client import cancel_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.parts import Part, Record, merge_parts
from jobs.control import advance
from jobs.control.advance import seed_of
from jobs.control.runner import Runner
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.queue.settings import QueueSettings
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import chat_line, check_echoes, failing, write_input
from tests.support.integrity import faults
from tests.support.kills import Killed
from tests.support.unreadable import few_descriptors


def die(*_: Any, **__: Any) -> None:
    raise Killed


def lines_on_disk(root: Path) -> Counter[int]:
    manifest = load_manifest(str(root))
    assert manifest is not None
    return Counter(record.line for record in merge_parts(str(root), manifest.parts))


def test_requests_carry_what_the_line_says(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    raw = '{"custom_id": "ü", "method": "POST", "url": "/v1/completions", "body": {"prompt":  "a\\u00e9", "x": 1e3}}\n'
    source.write_text(raw + chat_line("b").decode())
    batch = begin(redis_client, source, seed=5, default_model="m").id
    step(redis_client, batch)
    step(redis_client, batch)
    first, second = sorted(Queue(redis_client).claim("w", 1, 10, models=["m"]), key=lambda claim: claim.key)
    assert (first.key.line, first.request.custom_id, first.request.endpoint) == (1, "ü", "/v1/completions")
    assert json.loads(first.request.body) == {"prompt": "aé", "x": 1000.0, "model": "m"}
    assert second.request.body == raw_body(chat_line("b"))
    assert (first.request.seed, second.request.seed) == (seed_of(5, 1), seed_of(5, 2))


def raw_body(line: bytes) -> bytes:
    text = line.decode()
    return text[text.index('"body": ') + 8 : text.rindex("}")].encode()


def test_seeds_are_spread_and_fixed() -> None:
    seeds = {seed_of(seed, line) for seed in range(100) for line in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(0, 1) == 0xE220A8397B1DCDAF >> 1  # the first output of splitmix64 seeded with 0


def test_the_window_bounds_what_redis_holds(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_input(tmp_path / "in.jsonl", 400, user="x" * 20_000)
    batch = begin(redis_client, source).id
    queue = Queue(redis_client, QueueSettings(window_bytes=1_000_000))
    monkeypatch.setattr(advance, "CHUNK_BYTES", 200_000)
    highest = 0
    while not (record := step(redis_client, batch, queue)).ended:
        highest = max(highest, queue.window_bytes(batch))
        if record.waiting:
            low_water = queue.batch_fields(batch).low_water
            assert 0 < low_water < record.waiting or record.total == record.waiting + record.completed
        answer_all(redis_client, most=10)
    assert 500_000 < highest < 1_300_000
    check_echoes(tmp_path / "out.jsonl", 400)


def test_a_feed_reads_little_more_than_its_lines(redis_client: redis.Redis, tmp_path: Path) -> None:
    """The plan's order has nothing to do with the file's."""
    source = write_input(tmp_path / "in.jsonl", 3000, user="x" * 1000)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    queue = Queue(redis_client)
    fed, read = queue.window_lines(batch), bytes_read()
    step(redis_client, batch)
    assert queue.window_lines(batch) - fed >= 500
    assert bytes_read() - read < 2 * source.stat().st_size


def bytes_read() -> int:
    """How many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_batches_share_the_global_window(redis_client: redis.Redis, tmp_path: Path) -> None:
    queue = Queue(redis_client, QueueSettings(window_bytes=64_000_000))
    for batches, expected in ((1, 64_000_000), (8, 64_000_000), (16, 32_000_000), (100_000, advance._SMALLEST_WINDOW)):
        redis_client.delete("{q}:active")
        redis_client.sadd("{q}:active", *range(batches))
        assert advance.most_window_bytes(queue) == expected


def test_a_claim_that_runs_the_list_low_asks_for_a_slice(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "WINDOW_LINES", 100)
    monkeypatch.setattr(advance, "MAX_ITEMS", 50)
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 1000)).id
    step(redis_client, batch)
    record = step(redis_client, batch)
    assert record.waiting == 100
    answer_all(redis_client, most=49)
    queue = Queue(redis_client)
    assert queue.control_messages("jobs", "0-0", 0) == []
    assert not advance.feed_needed(queue, batch, queue.batch_fields(batch))
    answer_all(redis_client, most=10)
    assert [message.batch for message in queue.control_messages("jobs", "0-0", 0)] == [batch]
    assert advance.feed_needed(queue, batch, queue.batch_fields(batch))
    assert step(redis_client, batch).waiting >= 100


def test_a_fast_fleet_does_not_widen_the_window_beyond_its_most(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "WINDOW_LINES", 100)
    monkeypatch.setattr(advance, "_MOST_WINDOW_LINES", 200)
    monkeypatch.setattr(advance, "MAX_ITEMS", 50)
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 1000)).id
    step(redis_client, batch)
    assert step(redis_client, batch).waiting == 100
    answer_all(redis_client, most=60)
    advance._progress[batch].rate = 1e9
    assert 200 <= step(redis_client, batch).waiting < 250


def test_results_that_pile_up_ask_for_a_slice(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains them, though the last drain was a moment ago."""
    monkeypatch.setattr(advance, "DRAIN_SECONDS", math.inf)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(chat_line(f"c{n}", "x" * 50_000) for n in range(200)))
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    step(redis_client, batch)
    queue = Queue(redis_client)
    before = len(queue.control_messages("jobs", "0-0", 0))
    for _ in range(9):
        assert len(queue.control_messages("jobs", "0-0", 0)) == before
        assert answer_all(redis_client, most=5) == 5
        if queue.batch_fields(batch).result_bytes > 2 * 2**20:
            break
    assert len(queue.control_messages("jobs", "0-0", 0)) == before + 1
    answer_all(redis_client, most=5)
    assert len(queue.control_messages("jobs", "0-0", 0)) == before + 1
    step(redis_client, batch)
    assert queue.batch_fields(batch).result_bytes == 0


def test_lines_of_an_unserved_model_do_not_hold_up_the_others(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "WINDOW_LINES", 100)
    monkeypatch.setattr(advance, "MAX_ITEMS", 50)
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b"".join(
            chat_line(f"c{n}", f"say {n}", model="away" if n % 2 else "m", max_tokens=9 + 9 * (n % 2))
            for n in range(1, 801)
        )
    )
    batch = begin(redis_client, source, models=("m", "away")).id
    step(redis_client, batch)
    for _ in range(40):
        step(redis_client, batch)
        answer_all(redis_client)
    assert step(redis_client, batch).completed == 400


def test_an_absent_model_does_not_fill_the_window_of_the_others(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines wait on disk once they have their share, and run when its worker comes."""
    monkeypatch.setattr(advance, "CHUNK_BYTES", 20_000)
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b"".join(
            chat_line(f"c{n}", f"say {n}", model="away" if n % 2 else "m", max_tokens=9, user="x" * 2000)
            for n in range(1, 401)
        )
    )
    batch = begin(redis_client, source, models=("m", "away")).id
    queue = Queue(redis_client, QueueSettings(window_bytes=100_000))
    step(redis_client, batch, queue)
    for _ in range(100):
        answer_all(redis_client, most=10)
        record = step(redis_client, batch, queue)
        assert queue.window_bytes(batch) < 160_000
        if record.completed == 200:
            break
    assert record.completed == 200
    assert 0 < record.waiting < 60
    queue.register_worker(WorkerRecord("w2", ["away"], "ready", 4096, 1.0, "test", 1))
    record = run_to_end(redis_client, batch, models=("m", "away"), steps=100)
    assert (record.state, record.completed) == ("completed", 400)
    check_echoes(source.with_name("out.jsonl"), 400)


@pytest.mark.parametrize("point", ["write_part", "save_manifest", "drained", "progress_fields"])
@pytest.mark.parametrize("after", [False, True])
def test_a_drain_killed_anywhere_loses_and_doubles_nothing(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, after: bool
) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 60)).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=20)
    owner: Any = Queue if point == "drained" else advance
    real = getattr(owner, point)

    def run_then_die(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise Killed

    advance._progress.clear()
    with monkeypatch.context() as patch:
        patch.setattr(owner, point, run_then_die if after else die)
        with pytest.raises(Killed):
            step(redis_client, batch)
    advance._progress.clear()  # a new process remembers nothing
    answer_all(redis_client, most=15)
    record = run_to_end(redis_client, batch)
    assert (record.completed, record.failed) == (60, 0)
    assert record.usage.prompt_tokens == 60 * 7
    check_echoes(tmp_path / "out.jsonl", 60)
    assert lines_on_disk(tmp_path / "out.parts") == Counter(range(1, 61))
    assert len(list((tmp_path / "out.parts" / "parts").iterdir())) == len(
        load_manifest(str(tmp_path / "out.parts")).parts
    )  # type: ignore[union-attr]
    assert faults(redis_client) == []


def test_small_parts_are_merged(redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "DRAIN_SECONDS", 0)
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 200)).id
    step(redis_client, batch)
    most = 0
    while not step(redis_client, batch).ended:
        answer_all(redis_client, most=4)
        manifest = load_manifest(str(tmp_path / "out.parts"))
        assert manifest is not None
        most = max(most, len(manifest.parts))
        assert len(Queue(redis_client).parts(batch)) <= 18
    assert 10 < most <= 18
    check_echoes(tmp_path / "out.jsonl", 200)


def test_an_input_that_changes_under_the_batch_is_a_problem_until_it_is_back(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    source = write_input(tmp_path / "in.jsonl", 600)
    batch = begin(redis_client, source).id
    step(redis_client, batch)
    content = source.read_bytes()
    source.write_bytes(content.replace(b"say 3", b"say 4"))
    record = step(redis_client, batch)
    assert record.state == "in_progress"
    assert record.problem == f"{source} changed while its batch runs; put the file back, or cancel the batch"
    source.write_bytes(content)
    assert step(redis_client, batch).problem is None
    assert run_to_end(redis_client, batch).completed == 600


def test_a_damaged_part_is_not_merged_away(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "DRAIN_SECONDS", 0)
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 100)).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=4)
    step(redis_client, batch)
    [part] = (tmp_path / "out.parts" / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    while step(redis_client, batch).state != "finalizing":
        answer_all(redis_client, most=4)
    assert part.exists()
    manifest = load_manifest(str(tmp_path / "out.parts"))
    assert manifest is not None
    assert part.name in [listed.name for listed in manifest.parts]
    assert len(manifest.parts) < 20
    assert run_to_end(redis_client, batch).completed == 100
    check_echoes(tmp_path / "out.jsonl", 100)


def batch_of_16_parts(client: redis.Redis, folder: Path) -> str:
    """Of 4 lines each; 4 more have finished, and with them 16 parts become one."""
    batch = begin(client, write_input(folder / "in.jsonl", 100)).id
    step(client, batch)
    for _ in range(17):
        step(client, batch)
        answer_all(client, most=4)
    assert len(listed_parts(folder)) == 16
    return batch


def listed_parts(folder: Path) -> list[str]:
    manifest = load_manifest(str(folder / "out.parts"))
    assert manifest is not None
    return [part.name for part in manifest.parts]


def test_parts_that_cannot_be_merged_for_want_of_descriptors_stay(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "DRAIN_SECONDS", 0)
    batch = batch_of_16_parts(redis_client, tmp_path)
    listed = listed_parts(tmp_path)
    with few_descriptors(10):
        problem = step(redis_client, batch).problem or ""
    assert "Too many open files" in problem
    assert listed_parts(tmp_path) == listed
    assert len(lines_on_disk(tmp_path / "out.parts")) == 64
    record = step(redis_client, batch)
    assert (record.problem, record.stored_completed, len(listed_parts(tmp_path))) == (None, 68, 2)
    assert len(lines_on_disk(tmp_path / "out.parts")) == 68
    assert run_to_end(redis_client, batch).completed == 100
    check_echoes(tmp_path / "out.jsonl", 100)


def test_parts_of_which_one_breaks_as_they_are_merged_stay(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "DRAIN_SECONDS", 0)
    batch = batch_of_16_parts(redis_client, tmp_path)
    listed, folder = listed_parts(tmp_path), tmp_path / "out.parts" / "parts"

    def break_first(root: str, tier: list[Part], **options: Any) -> Iterator[Record]:
        path = folder / tier[5].name
        path.write_bytes(path.read_bytes()[:-1])
        return merge_parts(root, tier, **options)

    with monkeypatch.context() as patch:
        patch.setattr(advance, "merge_parts", break_first)
        assert step(redis_client, batch).problem is None
    assert listed_parts(tmp_path)[:-1] == listed
    assert sorted(path.name for path in folder.iterdir()) == sorted(listed_parts(tmp_path))
    assert run_to_end(redis_client, batch).completed == 100
    check_echoes(tmp_path / "out.jsonl", 100)


@pytest.mark.parametrize("driver", ["", "another"])
def test_a_slice_for_a_process_that_does_not_drive_the_batch_does_nothing(
    redis_client: redis.Redis, tmp_path: Path, driver: str
) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 1000)).id
    assert step(redis_client, batch).waiting == MAX_ITEMS
    redis_client.hset(keys.batch(batch), "driver", driver)
    assert Runner(Queue(redis_client), "mine").run(batch) == "drop"
    assert get_batch(redis_client, batch).waiting == MAX_ITEMS


def test_a_slice_goes_on_where_redis_has_an_older_generation_than_the_folder(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Redis went back to a moment before the batch changed its process."""
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id
    redis_client.hset(keys.batch(batch), "generation", 7)
    step(redis_client, batch)
    redis_client.hset(keys.batch(batch), "generation", 2)
    assert run_to_end(redis_client, batch).completed == 5
    assert Queue(redis_client).batch_fields(batch).generation == 7


def test_the_first_lines_can_be_claimed_once_a_batch_is_validated(redis_client: redis.Redis, tmp_path: Path) -> None:
    """No slice has had its turn yet."""
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 10)).id
    step(redis_client, batch)
    assert answer_all(redis_client) == 10
    assert step(redis_client, batch).state == "finalizing"
    assert run_to_end(redis_client, batch).completed == 10


def test_a_slice_ends_when_the_batch_is_cancelled_under_it(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 2000)).id
    step(redis_client, batch)
    real = Queue.ingest

    def ingest_then_cancel(queue: Queue, *arguments: Any) -> bool:
        done = real(queue, *arguments)
        cancel_batch(redis_client, batch)
        return done

    monkeypatch.setattr(Queue, "ingest", ingest_then_cancel)
    record = step(redis_client, batch)
    assert (record.state, record.waiting) == ("cancelling", 0)
    assert run_to_end(redis_client, batch).state == "cancelled"
    assert faults(redis_client) == []


@pytest.mark.parametrize("lost", ["everything", "the last second"])
@pytest.mark.parametrize("point", ["feed", "ready_lengths", "drain", "settle"])
def test_a_slice_ends_quietly_when_redis_forgets_the_batch_under_it(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    point: str,
    lost: str,
) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 2000)).id
    early = redis_client.dump(keys.batch(batch))
    step(redis_client, batch)
    real = getattr(advance, point)

    def forget(*arguments: Any) -> Any:
        redis_client.flushall()
        if lost == "the last second":
            redis_client.restore(keys.batch(batch), 0, early)  # type: ignore[arg-type]
        return real(*arguments)

    monkeypatch.setattr(advance, point, forget)
    advance._progress.clear()
    Runner(Queue(redis_client)).run(batch)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not Queue(redis_client).batch_fields(batch).problem


def test_flush_and_the_ticker_do_not_wait_for_an_absent_redis(tmp_path: Path) -> None:
    away = Queue(connect(f"unix://{tmp_path}/redis.sock"), QueueSettings(redis_retry_seconds=60))
    for work in (Runner(away).flush, away.active_batches):
        with pytest.raises(redis.ConnectionError):
            work()


def test_flush_keeps_what_finished(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 50)).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, failing(1, 2), most=30)
    Runner(Queue(redis_client)).flush()
    assert sum(lines_on_disk(tmp_path / "out.parts").values()) == 30
