"""The ticker keeps batches going whatever is killed: leases end, dead jobs run again, windows
close, a lost Redis comes back.
"""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchSpec, create_batch, get_batch
from jobs.batch.retention import forget_output
from jobs.control import runner, ticker, upkeep
from jobs.control.slices import Slice
from jobs.control.ticker import Ticker
from jobs.process import STOP_SIGNALS
from jobs.protocol.ids import PART, UPLOAD, new_id
from jobs.queue import keys
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.queue.tasks import take_batches, waiting_batches
from jobs.store.file_store import FileStore
from jobs.store.idempotency import IdempotencyKeys
from jobs.store.upload_store import UploadStore
from tests.support.batch_steps import answer_all, begin, run_to_end, step, tick, wait_for_batch
from tests.support.control_plane import (
    Answering,
    ControlPlane,
    check_echoes,
    control_plane,
    failing,
    read_jsonl,
    write_input,
)
from tests.support.integrity import faults
from tests.support.object_stores import bucket
from tests.support.slow_file import slow_reading
from tests.support.waiting import wait_for_end, wait_until

NAMES = ("driver", "twin", "ticker")


def spec_of(source: Path, **options: object) -> BatchSpec:
    root, output = source.with_name("out.parts"), source.with_name("out.jsonl")
    return BatchSpec(
        input=str(source), root=str(root), output=str(output), error_file="inline", models=("m",), **options
    )  # type: ignore[arg-type]


def test_one_leads_and_the_next_takes_over(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticker, "LEAD_SECONDS", 60.0)
    first, second = Ticker(Queue(redis_client)), Ticker(Queue(redis_client))
    assert first.lead()
    assert not second.lead()
    assert first.lead()
    redis_client.pexpire("{q}:leader", 1)
    wait_until(second.lead, 60, "the lead ran out")
    assert not first.lead()
    first.resign()
    assert second.lead()
    second.resign()
    assert first.lead()


def test_a_stop_whose_exception_was_lost_is_obeyed(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals come at any moment, also in a destructor, out of which no exception gets."""
    monkeypatch.setattr(ticker, "_stopping", threading.Event())
    with contextlib.suppress(SystemExit):
        stop_here()
    wait_for_end(Ticker(Queue(redis_client)).run, 60, "the ticker to end")


def test_a_stop_amid_a_drain_is_no_problem_of_the_batch(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server without memory has the ticker do."""
    monkeypatch.setattr(ticker, "_stopping", threading.Event())
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id
    step(redis_client, batch)
    monkeypatch.setattr(runner, "drain_all", lambda held: stop_here())
    with pytest.raises(SystemExit):
        Ticker(Queue(redis_client)).make_room()
    assert get_batch(redis_client, batch).problem is None


def stop_here() -> None:
    """What a signal does, but for the signals that are ignored from then on."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        ticker._stop(signal.SIGTERM, None)
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.proof
def test_a_lead_that_lasts_long_after_the_clock_was_set_back_is_cut_short(redis_client: redis.Redis) -> None:
    redis_client.set("{q}:leader", "the first", px=600_000)
    second = Ticker(Queue(redis_client))
    assert not second.lead()
    wait_until(second.lead, 60, "the lead ran out, in less than the minutes that were left")


def test_the_lead_passes_on_when_the_leader_is_killed(redis_client: redis.Redis, redis_url: str) -> None:
    first, second = ControlPlane(redis_url), ControlPlane(redis_url)
    try:
        first.start("ticker")
        token = wait_until(lambda: redis_client.get("{q}:leader"), 60, "one leads")
        second.start("ticker")
        first.kill("ticker")
        wait_until(lambda: redis_client.get("{q}:leader") not in (None, token), 60, "the other leads")
    finally:
        for plane in (first, second):
            for name in list(plane.processes):
                plane.kill(name)


def test_leases_of_a_vanished_worker_end(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEASE_SECONDS", "1")
    source = write_input(tmp_path / "in.jsonl", 50)
    with control_plane(redis_url):
        batch = create_batch(redis_client, spec_of(source)).id
        wait_until(lambda: get_batch(redis_client, batch).waiting == 50, 60, "lines are ready")
        assert len(Queue(redis_client).claim("vanishing", 1, 20, models=["m"])) == 20
        with Answering(redis_url):
            assert wait_for_batch(redis_client, batch, timeout=120).completed == 50
    check_echoes(tmp_path / "out.jsonl", 50)


def test_a_window_that_closes_keeps_what_is_done(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 20), completion_window_seconds=3600.0).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, failing(2), most=8)
    leader = Ticker(Queue(redis_client))
    tick(leader)
    assert get_batch(redis_client, batch).state == "in_progress"
    redis_client.hset("{q}:batch:" + batch, "expires_at", time.time() - 1)
    tick(leader)
    tick(leader)
    record = run_to_end(redis_client, batch)
    assert (record.state, record.total, record.completed + record.failed) == ("expired", 20, 20)
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(1, 21)]
    assert sum(line["response"] is None and line["error"]["code"] == "batch_expired" for line in lines) == 12


def test_a_batch_that_expires_before_it_is_validated(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 5), completion_window_seconds=-1.0).id
    tick(Ticker(Queue(redis_client)))
    record = run_to_end(redis_client, batch)
    assert (record.state, record.total, record.failed) == ("expired", 0, 0)


def test_the_batch_of_a_process_that_died_goes_to_another_under_a_new_generation(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, queue = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id, Queue(redis_client)
    assert take_batches(queue, 9) == [batch]
    redis_client.hset(keys.batch(batch), "driver", "first")
    redis_client.set(keys.driver("first"), 1)
    leader = Ticker(queue)
    leader.tick()
    redis_client.delete(keys.driver("first"))
    leader.tick()
    assert (queue.batch_fields(batch).generation, waiting_batches(queue)) == (1, set()), "Redis may have lost its key"
    monkeypatch.setattr(ticker, "GONE_SECONDS", -1.0)
    leader.tick()
    assert (queue.batch_fields(batch).generation, waiting_batches(queue)) == (2, {batch})
    assert run_to_end(redis_client, batch).completed == 5


def test_a_key_that_lasts_longer_than_any_driver_sets_it_is_no_sign_of_life(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of Redis was set back by an hour, and the process was killed then."""
    monkeypatch.setattr(ticker, "GONE_SECONDS", -1.0)
    monkeypatch.setattr(ticker, "ALIVE_SECONDS", 3600)
    batch, queue = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id, Queue(redis_client)
    redis_client.hset(keys.batch(batch), "driver", "first")
    leader = Ticker(queue)
    redis_client.set(keys.driver("first"), 1, ex=3600)
    leader.tick()
    assert queue.batch_fields(batch).generation == 1
    redis_client.set(keys.driver("first"), 1, ex=7200)
    leader.tick()
    assert queue.batch_fields(batch).generation == 2


def test_a_driver_whose_key_comes_back_lives(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, queue = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id, Queue(redis_client)
    redis_client.hset(keys.batch(batch), "driver", "first")
    leader = Ticker(queue)
    leader.tick()
    redis_client.set(keys.driver("first"), 1)
    leader.tick()
    redis_client.delete(keys.driver("first"))
    assert ticker.GONE_SECONDS > 0
    leader.tick()
    assert queue.batch_fields(batch).generation == 1


def test_a_batch_that_no_process_took_is_handed_out_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    """The process that took it was killed before it named itself, or RQ's job was lost."""
    batch, queue = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id, Queue(redis_client)
    assert take_batches(queue, 9) == [batch]
    Ticker(queue).tick()
    assert waiting_batches(queue) == {batch}
    for key in redis_client.scan_iter("rq:*"):
        redis_client.delete(key)
    Ticker(queue).tick()
    assert redis_client.llen("rq:queue:batches") == 1


def test_leases_end_while_the_file_store_is_slow(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One listing lasts until the lease is over."""
    monkeypatch.setattr(ticker, "_stopping", threading.Event())
    queue = Queue(redis_client, QueueSettings(lease_seconds=1))
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id
    step(redis_client, batch)
    step(redis_client, batch)
    assert len(queue.claim("vanishing", 1, 5, models=["m"])) == 5
    ended = threading.Event()

    def list_slowly(*arguments: object) -> list[str]:
        ended.wait(120)
        return []

    monkeypatch.setattr(upkeep, "unknown_folders", list_slowly)
    leader = Ticker(queue, str(tmp_path / "store"))
    leader.start()
    running = threading.Thread(target=leader.run)
    running.start()
    try:
        wait_until(lambda: get_batch(redis_client, batch).waiting == 5, 60, "the lease has ended")
    finally:
        ticker._stopping.set()
        ended.set()
        running.join()
        leader._upkeep_due.set()
        leader._upkeep_thread.join()  # which would note its store in the Redis of the next test


def test_a_ticker_that_starts_while_the_bucket_is_away_ends_leases_and_then_looks_into_it(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    queue = Queue(redis_client, QueueSettings(lease_seconds=1))
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 5)).id
    step(redis_client, batch)
    step(redis_client, batch)
    assert len(queue.claim("vanishing", 1, 5, models=["m"])) == 5
    with bucket() as remote:
        files = FileStore(queue, remote.uri, forget_output)
        with files.begin(filename="in.jsonl", purpose="batch", tenant="") as upload:
            kept = upload.commit()
        remote.server.denied = True
        leader = Ticker(queue, remote.uri)

        def has_ended() -> bool:
            tick(leader)
            return get_batch(redis_client, batch).waiting == 5

        wait_until(has_ended, 60, "the lease has ended")
        redis_client.flushall()
        remote.server.denied = False
        tick(leader)
        assert files.list("", after=None, limit=10, order="asc", purpose=None).items == [kept]


def test_a_slice_that_redis_failed_leaves_no_job_behind(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begin(redis_client, write_input(tmp_path / "in.jsonl", 5))
    step(redis_client, record.id)

    for error in (redis.ConnectionError("away"), QueueUnavailable("away")):

        def fail(held: Slice, error: Exception = error) -> None:
            raise error

        monkeypatch.setitem(runner.WORK, "advance", fail)
        step(redis_client, record.id)
    assert get_batch(redis_client, record.id).problem is None


@pytest.mark.proof
@pytest.mark.parametrize("state", ["validating", "in_progress"])
def test_a_killed_process_costs_seconds_and_nothing_else(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, state: str
) -> None:
    """SIGKILL in the middle of a job, which RQ would notice after minutes: the job reads its input
    so slowly that it is not through yet.
    """
    source = write_input(tmp_path / "in.jsonl", 5000)
    queue, slow = Queue(redis_client), {} if state == "in_progress" else slow_reading(source, 0.02)
    first, second = ControlPlane(redis_url, environment=slow), ControlPlane(redis_url)
    first.start("driver")
    try:
        batch = create_batch(redis_client, spec_of(source)).id
        wait_until(lambda: get_batch(redis_client, batch).state == state, 60, "what comes before")
        killed = wait_until(lambda: queue.batch_fields(batch).driver, 60, "a process that drives it")
        first.kill("driver")
        assert get_batch(redis_client, batch).state == state
        second.start("twin", "ticker")
        with Answering(redis_url, limit=200):
            record = wait_for_batch(redis_client, batch, timeout=120)
        assert queue.batch_fields(batch).driver not in ("", killed)
        second.stop()
    finally:
        for plane in (first, second):
            for left in list(plane.processes):
                plane.kill(left)
    assert (record.state, record.completed) == ("completed", 5000)
    check_echoes(tmp_path / "out.jsonl", 5000)
    assert faults(redis_client) == []


def test_a_redis_that_came_back_empty_is_rebuilt(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    root = tmp_path / "store" / "batches" / "b"
    root.mkdir(parents=True)
    source = write_input(root / "in.jsonl", 3000)
    spec = BatchSpec(
        input=str(source), root=str(root), output=str(root / "out.jsonl"), error_file="inline", models=("m",)
    )
    with (
        control_plane(redis_url, ["--file-store", str(tmp_path / "store")]),
        Answering(redis_url, limit=20, pause=0.005),
    ):
        batch = create_batch(redis_client, spec).id
        wait_until(lambda: get_batch(redis_client, batch).usage.prompt_tokens > 0, 60, "a part is registered")
        redis_client.flushall()

        def ended() -> bool:
            try:
                return get_batch(redis_client, batch).ended
            except KeyError:
                return False

        wait_until(ended, 120, "the rebuilt batch ends")
        record = get_batch(redis_client, batch)
    assert (record.state, record.completed) == ("completed", 3000)
    check_echoes(root / "out.jsonl", 3000)


def test_files_are_indexed_again_and_removed_in_time(redis_client: redis.Redis, queue: Queue, tmp_path: Path) -> None:
    files = FileStore(queue, str(tmp_path), forget_output)
    with files.begin(filename="in.jsonl", purpose="batch", tenant="") as upload:
        kept = upload.commit()
    with files.begin(filename="in.jsonl", purpose="batch", tenant="", expires_seconds=0) as upload:
        upload.commit()
    redis_client.flushall()
    tick(Ticker(queue, str(tmp_path)))
    assert files.list("", after=None, limit=10, order="asc", purpose=None).items == [kept]
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]


@pytest.mark.parametrize(("hours", "left"), [(0, 4), (2, 3), (26, 0)])
def test_uploads_and_idempotency_keys_are_removed_in_time(
    redis_client: redis.Redis, queue: Queue, tmp_path: Path, hours: int, left: int
) -> None:
    files, made = FileStore(queue, str(tmp_path), forget_output), time.time() - 3600 * hours
    uploads, idempotency_keys = UploadStore(queue, files), IdempotencyKeys(queue, files)
    upload = uploads.create(filename="a", purpose="vision", size=1, tenant="", upload_id=new_id(UPLOAD, made))
    (uploads.folder(upload.id) / new_id(PART, made)).write_bytes(b"x")
    with idempotency_keys.hold("", UPLOAD, "key") as held:
        held.make_once("digest", upload.id, lambda _: None, lambda _: {})
    for path in (tmp_path / "idempotency").iterdir():
        os.utime(path, (made, made))
    tick(Ticker(queue, str(tmp_path)))
    found = [*tmp_path.glob("uploads/*"), *tmp_path.glob("uploads/*/[pu]*"), *tmp_path.glob("idempotency/*")]
    assert len(found) == left, found


def test_idempotency_keys_are_removed_however_many_there_are(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment is enough for one of them here."""
    monkeypatch.setattr(upkeep, "MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "SWEEP_SECONDS", 0.0)
    files = FileStore(queue, str(tmp_path), forget_output)
    for number in range(6):
        with IdempotencyKeys(queue, files).hold("", UPLOAD, f"{number}") as held:
            held.make_once("digest", "id", lambda _: None, lambda _: {})
    last = list(os.scandir(tmp_path / "idempotency"))[-1]
    os.utime(last.path, (0, 0))
    leader = upkeep.Upkeep(queue, str(tmp_path))
    for _ in range(6):
        leader.run_once()
    assert len(os.listdir(tmp_path / "idempotency")) == 5
    assert not os.path.exists(last.path)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_kill_rounds(redis_client: redis.Redis, redis_url: str, tmp_path: Path, seed: int) -> None:
    """Six batches, each with processes of the control plane killed at random moments: every line
    exactly once, every answer right.
    """
    rng = random.Random(seed)
    with control_plane(redis_url) as plane, Answering(redis_url, failing(7), limit=64, pause=0.002):
        for turn in range(6):
            source = write_input(tmp_path / f"r{turn}" / "in.jsonl", rng.choice([300, 3000, 10_000]))
            batch = create_batch(redis_client, spec_of(source)).id
            deadline = time.monotonic() + 120
            kills = rng.randrange(1, 4)
            while not (record := get_batch(redis_client, batch)).ended:
                assert time.monotonic() < deadline, record
                moment = time.monotonic() + rng.expovariate(3)
                wait_until(lambda moment=moment: time.monotonic() >= moment, 60, "the next kill")  # type: ignore[misc]
                if kills:
                    kills -= 1
                    name = rng.choice(NAMES)
                    plane.kill(name)
                    plane.start(name)
            lines = read_jsonl(source.with_name("out.jsonl"))
            assert (record.state, record.failed, record.completed + 1) == ("completed", 1, record.total)
            assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(1, record.total + 1)]
            for number, line in enumerate(lines, 1):
                body = line["response"]["body"]
                assert number == 7 or body["choices"][0]["message"]["content"] == f"say {number}"
            assert faults(redis_client) == []


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_many_small_batches_beside_a_large_one(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """A hundred batches of ten lines each end long before one of 100,000 lines that came first,
    which takes a minute until then.
    """
    large = write_input(tmp_path / "large" / "in.jsonl", 100_000)
    with control_plane(redis_url), Answering(redis_url, limit=64, pause=0.04) as worker:
        first = create_batch(redis_client, spec_of(large)).id
        wait_until(lambda: get_batch(redis_client, first).completed > 0, 60, "the large one runs")
        small = [
            create_batch(redis_client, spec_of(write_input(tmp_path / f"s{n}" / "in.jsonl", 10))).id for n in range(100)
        ]
        for batch in small:
            assert wait_for_batch(redis_client, batch, timeout=60).completed == 10
        assert not get_batch(redis_client, first).ended
        worker.pause = 0.002
        assert wait_for_batch(redis_client, first, timeout=300).completed == 100_000
    check_echoes(large.with_name("out.jsonl"), 100_000)
