"""A Redis that came back empty gets its batches back from their manifests, and they end as if
nothing had happened.
"""

import os
import signal
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchSpec, cancel_batch, create_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.parts import merge_parts
from jobs.batch.rebuild import rebuild, rebuild_all
from jobs.control.runner import Runner
from jobs.control.ticker import Ticker
from jobs.protocol.requests import Claim
from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.store.storage import exclusive
from tests.support.batch_steps import answer_all, begin, list_batches, run_to_end, step, tick
from tests.support.control_plane import Answering, ControlPlane, check_echoes, echo, failing, read_jsonl, write_input
from tests.support.integrity import faults
from tests.support.kills import killed_at
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until


def in_store(client: redis.Redis, store: Path, name: str, count: int) -> str:
    root = store / "batches" / name
    root.mkdir(parents=True)
    source = write_input(root / "in.jsonl", count)
    spec = BatchSpec(
        input=str(source),
        root=str(root),
        output=str(root / "out.jsonl"),
        error_file="inline",
        models=("m",),
        tenant="t",
    )
    return create_batch(client, spec).id


def test_every_state_comes_back(redis_client: redis.Redis, tmp_path: Path) -> None:
    names = ("new", "refused", "running", "finishing", "ended", "cancelled")
    ids = {name: in_store(redis_client, tmp_path, name, 20) for name in names}
    (tmp_path / "batches" / "refused" / "in.jsonl").write_bytes(b"oops\n")
    step(redis_client, ids["running"])
    assert answer_all(redis_client, failing(3), most=12) == 12
    step(redis_client, ids["running"])
    for name in ("refused", "finishing", "ended", "cancelled"):
        step(redis_client, ids[name])
    for name in ("finishing", "ended"):
        while step(redis_client, ids[name]).state != "finalizing":
            queue = Queue(redis_client)
            redis_client.delete("{q}:ready:" + ids["running"] + ":m")
            answer_all(redis_client)
            assert queue.batch_fields(ids[name]).state == "in_progress"
    run_to_end(redis_client, ids["ended"])
    cancel_batch(redis_client, ids["cancelled"])
    run_to_end(redis_client, ids["cancelled"])
    before = {name: get_batch(redis_client, batch) for name, batch in ids.items()}

    redis_client.flushall()
    assert rebuild_all(Queue(redis_client), str(tmp_path)) == (len(names), [])
    assert rebuild_all(Queue(redis_client), str(tmp_path)) == (0, [])
    after = {name: get_batch(redis_client, batch) for name, batch in ids.items()}
    for name in ("refused", "ended", "cancelled"):
        assert after[name] == before[name]
    for name in ("new", "running", "finishing"):
        assert after[name].state == "validating"
        record = run_to_end(redis_client, ids[name])
        assert (record.state, record.completed + record.failed) == ("completed", 20)
    check_echoes(tmp_path / "batches" / "finishing" / "out.jsonl", 20)
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "batches" / "running" / "out.jsonl")] == [
        f"c{n}" for n in range(1, 21)
    ]
    assert faults(redis_client) == []


def test_what_is_on_disk_is_not_done_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = in_store(redis_client, tmp_path, "b", 5000)
    while get_batch(redis_client, batch).waiting < 3000:  # a slice has only so much time
        step(redis_client, batch)
    answer_all(redis_client, failing(7, status=500), most=3000)
    Runner(Queue(redis_client)).flush()
    stored = get_batch(redis_client, batch)
    assert (stored.stored_completed, stored.stored_failed) == (2999, 1)
    redis_client.flushall()
    rebuild_all(Queue(redis_client), str(tmp_path))
    record = step(redis_client, batch)
    assert (record.state, record.total, record.completed + record.failed) == ("in_progress", 5000, 3000)
    assert record.usage.prompt_tokens == 7 * record.completed
    assert record.usage.device_microseconds == 250_000 * record.completed
    seen = []
    record = run_to_end(redis_client, batch, lambda claim: seen.append(claim.key.line) or failing()(claim))
    assert len(seen) == 2000
    assert record.completed + record.failed == 5000
    assert Queue(redis_client).batch_fields(batch).tenant == "t"


def test_a_cancel_survives(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = in_store(redis_client, tmp_path, "b", 20)
    step(redis_client, batch)
    cancel_batch(redis_client, batch)
    redis_client.flushall()
    rebuild_all(Queue(redis_client), str(tmp_path))
    record = run_to_end(redis_client, batch)
    assert (record.state, record.failed) == ("cancelled", 20)


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_broken_manifest_does_not_hold_up_the_others(
    redis_client: redis.Redis, tmp_path: Path, content: bytes
) -> None:
    in_store(redis_client, tmp_path, "a", 1)
    batch = in_store(redis_client, tmp_path, "b", 1)
    (tmp_path / "batches" / "a" / "manifest.json").write_bytes(content)
    (tmp_path / "batches" / "empty").mkdir()
    redis_client.flushall()
    assert rebuild_all(Queue(redis_client), str(tmp_path)) == (1, [])
    assert [record.id for record in list_batches(redis_client)] == [batch]


def test_a_folder_in_other_hands_is_tried_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = in_store(redis_client, tmp_path, "b", 1)
    redis_client.flushall()
    ticker = Ticker(Queue(redis_client), str(tmp_path))
    with exclusive(str(tmp_path / "batches" / "b"), 0):
        tick(ticker)
        assert list_batches(redis_client) == []
    tick(ticker)
    assert get_batch(redis_client, batch).state == "validating"


def test_a_file_store_that_cannot_be_read_does_not_end_the_ticker(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "batches").mkdir()
    monkeypatch.setattr(os, "listdir", fail)
    tick(Ticker(Queue(redis_client), str(tmp_path)))
    assert "Input/output error" in caplog.text


def test_jobs_of_the_lost_record_are_of_an_old_generation(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = in_store(redis_client, tmp_path, "b", 1)
    old = Queue(redis_client).batch_fields(batch).generation
    redis_client.flushall()
    assert rebuild(Queue(redis_client), str(tmp_path / "batches" / "b"))
    assert Queue(redis_client).batch_fields(batch).generation > old
    manifest = load_manifest(str(tmp_path / "batches" / "b"))
    assert manifest is not None
    assert manifest.generation == old + 1


@pytest.mark.proof
def test_everything_killed_and_started_again(tmp_path: Path) -> None:
    """The whole stack dies with its private server, twice; what is on disk is never done again, and
    every line ends once.
    """
    source = write_input(tmp_path / "in.jsonl", 2000)
    output = tmp_path / "out.jsonl"
    spec = BatchSpec(
        input=str(source), root=str(tmp_path / "out.parts"), output=str(output), error_file="inline", models=("m",)
    )
    kept: set[int] = set()
    for share in (0.2, 0.6, 1.0):
        seen: set[int] = set()

        def answer(claim: Claim, seen: set[int] = seen) -> Result:
            seen.add(claim.key.line)
            return echo(claim)

        with running_server() as server, Answering(server.url, answer, limit=8, pause=0.005) as worker:
            plane = ControlPlane(server.url)
            plane.start()
            client = connect(server.url)
            batch = create_batch(client, spec).id
            enough = wait_until(lambda: has_come(client, batch, share), 120, f"{share:.0%} are on disk")  # noqa: B023
            for name in list(plane.processes):
                plane.kill(name)
            os.kill(server.pid, signal.SIGKILL)
            worker.stop()
            client.close()
        assert enough
        assert not kept & seen
        manifest = load_manifest(spec.root)
        assert manifest is not None
        kept = {record.line for record in merge_parts(spec.root, manifest.parts)}
    assert manifest.state == "completed"
    check_echoes(output, 2000)


def has_come(client: redis.Redis, batch: str, share: float) -> bool:
    """Whether so much of a batch is in parts; for all of it, whether it ended."""
    record = get_batch(client, batch)
    return record.ended if share == 1 else record.usage.prompt_tokens >= 7 * 2000 * share


def test_a_start_that_was_killed_between_manifest_and_record(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    with killed_at(monkeypatch, Queue, "create_batch", after=False):
        begin(redis_client, source)
    assert list_batches(redis_client) == []
    assert run_to_end(redis_client, begin(redis_client, source).id).completed == 10
    check_echoes(tmp_path / "out.jsonl", 10)
