"""Redis goes back by some steps, at any moment and often: what a client has seen of a batch stays
true. Counts neither exceed the total nor fall, a line keeps the outcome that could be read, and
ends once.
"""

import json
import random
import secrets
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import redis

from api.batch_objects import batch_object
from jobs.batch import manifest, stored_lines
from jobs.batch.bitmap import Bitmap
from jobs.batch.client import BatchRecord, cancel_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.parts import salvage
from jobs.batch.rebuild import rebuild
from jobs.batch.stored_lines import NAME, read_stored
from jobs.control import advance
from jobs.control.runner import Runner
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import ApiError, Result, encode_json
from jobs.protocol.states import END_STATES, JOBS, STATES
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import echo, failing, read_jsonl, write_input
from tests.support.integrity import faults
from tests.support.rollback import EarlierRedis
from tests.support.store_batches import (
    check_every_line_once,
    content_of,
    lines_of,
    log_of,
    manifest_of,
    serve,
    submit,
    under_way,
)

LINES = 80
STEPS_BACK = 12
ORDER = {state: place for place, state in enumerate(STATES)}
KINDS = pytest.mark.parametrize(
    ("location", "of_api"),
    [
        pytest.param("folder", True, id="api"),
        pytest.param("folder", False, id="run-batch"),
        pytest.param("bucket", True, id="bucket", marks=pytest.mark.proof),
    ],
    indirect=["location"],
)
"""Of batches."""


class Fuzz:
    """A batch under way, and what was seen of it."""

    def __init__(self, client: redis.Redis, folder: PurePath, dice: random.Random, of_api: bool, fails: float) -> None:
        self.client, self.folder, self.dice, self.fails = client, folder, dice, fails
        self.queue = Queue(client)
        self.of_api = of_api
        if of_api:
            self.batch = submit(client, folder, lines_of(LINES)).id
        else:
            self.batch = begin(client, write_input(Path(folder, "in.jsonl"), LINES), error_file="separate").id
        self.seqs = dict.fromkeys(range(3), 0)  # of workers, by the last claim
        self.lives = len(self.seqs)
        self.seen = (0, 0, 0)
        self.state = "validating"
        self.log = b""
        self.snapshots = [EarlierRedis(client)]

    def run(self, steps: int) -> BatchRecord:
        actions = [self.work] * 5 + [self.answer] * 5 + [self.drop, self.forget, self.go_back]
        for _ in range(steps):
            self.dice.choice(actions)()
            self.look()
            self.snapshots = [*self.snapshots, EarlierRedis(self.client)][-STEPS_BACK:]
        for worker in range(self.lives):  # as leases end that Redis has again
            self.queue.reap(f"w{worker}")
        self.seqs = {self.lives: 0}
        for _ in range(200):
            record = self.look()
            if self.queue.batch_fields(self.batch).state in END_STATES:
                break
            self.work()
            self.answer()
        assert record.ended, record
        assert faults(self.client) == []
        return record

    def work(self) -> None:
        """Run the job that the state asks for, as its driver does."""
        fields = self.queue.batch_fields(self.batch)
        if fields.state not in JOBS:
            return
        Runner(self.queue).run(self.batch)
        assert not self.queue.batch_fields(self.batch).problem

    def answer(self) -> None:
        worker, claims = self.claim()
        self.queue.commit(f"w{worker}", [Finished(claim.key, claim.fence, self.result(claim)) for claim in claims])

    def result(self, claim: Claim) -> Result:
        """Another one each time that a line is run."""
        if self.dice.random() < self.fails:
            return ApiError(400, f"no such luck {self.dice.random()}").result("req_1")
        body = json.loads(echo(claim).body) | {"nonce": self.dice.random()}
        return Result(200, encode_json(body), echo(claim).usage, "req_1")

    def drop(self) -> None:
        """A worker claims and dies."""
        worker, _ = self.claim()
        self.queue.reap(f"w{worker}")
        del self.seqs[worker]
        self.seqs[self.lives] = 0
        self.lives += 1

    def claim(self) -> tuple[int, list[Claim]]:
        worker = self.dice.choice(sorted(self.seqs))
        self.seqs[worker] += 1
        limit = self.dice.randint(1, 20)
        return worker, self.queue.claim(f"w{worker}", self.seqs[worker], limit, models=["m"])

    def forget(self) -> None:
        """The process that ran the slices is another one."""
        advance._progress.clear()
        stored_lines._kept.clear()
        manifest.PROCESS = secrets.token_hex(8)

    def go_back(self) -> None:
        self.dice.choice(self.snapshots).restore()

    def look(self) -> BatchRecord:
        """Compare what clients see with what they saw before."""
        record = get_batch(self.client, self.batch)
        shown = batch_object(record)
        counts = shown["request_counts"]
        now = (counts["completed"], counts["failed"], shown["usage"]["total_tokens"])
        assert ORDER[shown["status"]] >= ORDER[self.state], (self.state, shown["status"])
        self.state = shown["status"]
        assert all(new >= old for new, old in zip(now, self.seen, strict=True)), (self.seen, now)
        assert now[0] + now[1] <= counts["total"] <= LINES
        assert now[2] == 10 * now[0]  # what `echo` uses
        assert record.completed + record.failed <= max(record.total, now[0] + now[1])
        self.seen = now
        if self.of_api:
            log = log_of(record)
            assert log.startswith(self.log)
            assert len(log.splitlines()) == now[0]
            self.log = log
        return record


def check_end(fuzz: Fuzz, record: BatchRecord) -> None:
    if fuzz.of_api:
        good = content_of(fuzz.client, fuzz.folder, record.output_file_id).splitlines()
        bad = content_of(fuzz.client, fuzz.folder, record.error_file_id).splitlines()
        assert sorted(fuzz.log.splitlines()) == sorted(good)
    else:
        good = Path(record.output).read_bytes().splitlines() if record.output else []
        bad = Path(record.error_output).read_bytes().splitlines() if record.error_output else []
    ids = [json.loads(line)["custom_id"] for line in [*good, *bad]]
    assert sorted(ids) == sorted(f"c{number}" for number in range(1, LINES + 1))
    assert (record.completed, record.failed, record.total) == (len(good), len(bad), LINES)
    assert record.usage.completion_tokens == 3 * len(good)


def fuzz(client: redis.Redis, folder: PurePath, seed: int, of_api: bool) -> None:
    print(f"seed {seed}")
    client.flushall()
    advance._progress.clear()
    run = Fuzz(client, folder, random.Random(seed), of_api, fails=(0.0, 0.4, 1.0)[seed % 3])
    check_end(run, run.run(steps=60))


@pytest.fixture(autouse=True)
def _drain_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(advance, "WINDOW_LINES", 30)
    monkeypatch.setattr(stored_lines, "SMALL_BYTES", 2000)
    monkeypatch.setattr(manifest, "PROCESS", manifest.PROCESS)


@pytest.fixture
def _no_part_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_lines, "SMALL_BYTES", 0)


@KINDS
@pytest.mark.parametrize("number", [0, 1])
def test_what_was_seen_stays_true(
    redis_client: redis.Redis, folder: PurePath, seed: int, number: int, of_api: bool
) -> None:
    fuzz(redis_client, folder, seed + number, of_api)


@pytest.mark.proof
@pytest.mark.timeout(1500)
@KINDS
@pytest.mark.parametrize("number", range(2, 37))
def test_what_was_seen_stays_true_with_many_seeds(
    redis_client: redis.Redis, folder: PurePath, seed: int, number: int, of_api: bool
) -> None:
    fuzz(redis_client, folder, seed + number, of_api)


def rolled_back(
    client: redis.Redis, folder: PurePath, answers: list[Callable[[Claim], Result]]
) -> tuple[str, list[Any]]:
    """Redis goes back before lines are answered; the id, and the counts after each drain."""
    batch = submit(client, folder, lines_of(10)).id
    step(client, batch)
    step(client, batch)
    before = EarlierRedis(client)
    counts = []
    for answer in answers:
        before.restore()
        answer_all(client, answer, most=6)
        counts.append(batch_object(step(client, batch))["request_counts"])
    return batch, counts


def test_a_failed_line_that_ran_again_is_counted_once(redis_client: redis.Redis, folder: PurePath) -> None:
    fails = failing(*range(1, 11))
    _, counts = rolled_back(redis_client, folder, [fails, fails])
    assert counts == [{"total": 10, "completed": 0, "failed": 6}] * 2


def test_the_first_outcome_on_disk_stays(redis_client: redis.Redis, folder: PurePath) -> None:
    """Whether the file of a batch is read whole or by lines."""
    batch, _ = rolled_back(redis_client, folder, [failing(*range(1, 11)), echo])
    running = log_of(get_batch(redis_client, batch))
    ended = run_to_end(redis_client, batch)
    assert running == b""
    assert (ended.completed, ended.failed) == (4, 6)
    assert sorted(log_of(ended).splitlines()) == sorted(
        content_of(redis_client, folder, ended.output_file_id).splitlines()
    )


def test_lines_on_disk_do_not_run_again(redis_client: redis.Redis, folder: PurePath) -> None:
    batch = submit(redis_client, folder, lines_of(10)).id
    step(redis_client, batch)
    step(redis_client, batch)
    before = EarlierRedis(redis_client)
    answer_all(redis_client, most=6)
    step(redis_client, batch)
    before.restore()
    held = Queue(redis_client).claim("other", 1, 2, models=["m"])
    step(redis_client, batch)
    assert faults(redis_client) == []
    lost = Queue(redis_client).renew("other", [(claim.key, claim.fence) for claim in held])
    assert answer_all(redis_client) + len(held) - len(lost) == 4


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_end_that_redis_lost_is_still_shown(redis_client: redis.Redis, folder: PurePath, cancelled: bool) -> None:
    record = under_way(redis_client, folder)
    earlier = [EarlierRedis(redis_client)]
    if cancelled:
        cancel_batch(redis_client, record.id)
        earlier.append(EarlierRedis(redis_client))
    ended = run_to_end(redis_client, record.id)
    shown = batch_object(ended)
    assert shown["status"] == ("cancelled" if cancelled else "completed")
    queue = Queue(redis_client)
    for before in earlier:
        before.restore()
        assert queue.transition(record.id, [*JOBS], queue.batch_fields(record.id).state, {"problem": "no space"})
        assert batch_object(get_batch(redis_client, record.id)) == shown
        assert batch_object(cancel_batch(redis_client, record.id)) == shown
        assert batch_object(run_to_end(redis_client, record.id)) == shown
        assert faults(redis_client) == []


def test_states_that_redis_lost_are_still_shown(redis_client: redis.Redis, folder: PurePath) -> None:
    batch = submit(redis_client, folder, lines_of(3)).id
    earlier, state = [EarlierRedis(redis_client)], "validating"
    while state != "finalizing":
        state = step(redis_client, batch).state
        answer_all(redis_client)
        for before in [*earlier, EarlierRedis(redis_client)]:  # the last one as it is now
            before.restore()
            assert batch_object(get_batch(redis_client, batch))["status"] == state
        earlier.append(before)


def test_a_cancel_that_redis_lost_is_not(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    before = EarlierRedis(redis_client)
    cancel_batch(redis_client, record.id)
    before.restore()
    step(redis_client, record.id)
    assert get_batch(redis_client, record.id).state in ("cancelling", "cancelled")


def test_outputs_beside_the_input(redis_client: redis.Redis, tmp_path: Path) -> None:
    """A batch of run-batch has its failures in their place, the first outcome of each."""
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 4)).id
    step(redis_client, batch)
    step(redis_client, batch)
    before = EarlierRedis(redis_client)
    answer_all(redis_client, failing(1, 2, 3, 4), most=2)
    step(redis_client, batch)
    before.restore()
    record = run_to_end(redis_client, batch)
    assert record.usage.prompt_tokens == 14
    statuses = [line["response"]["status_code"] for line in read_jsonl(tmp_path / "out.jsonl")]
    assert sorted(statuses) == [200, 200, 400, 400]
    assert (record.completed, record.failed) == (2, 2)


@pytest.mark.usefixtures("_no_part_is_small")
def test_a_bitmap_that_is_damaged_or_gone_is_made_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    root = Path(under_way(redis_client, tmp_path).spec.root)
    parts = load_manifest(str(root)).parts  # type: ignore[union-attr]
    lines = read_stored(str(root), parts, lambda: None).bits
    assert sum(map(int.bit_count, lines)) == 8
    for content in (None, b"", b"x" * 40, (root / NAME).read_bytes()[:-1]):
        (root / NAME).unlink() if content is None else (root / NAME).write_bytes(content)
        assert read_stored(str(root), parts, lambda: None).bits == lines


@pytest.mark.parametrize("lost", ["damaged", "missing"])
def test_a_part_that_broke_before_redis_went_back(redis_client: redis.Redis, tmp_path: Path, lost: str) -> None:
    """Its lines run again, and no line is counted twice meanwhile."""
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 40)).id
    step(redis_client, batch)
    step(redis_client, batch)
    before = EarlierRedis(redis_client)
    answer_all(redis_client, most=20)
    record = step(redis_client, batch)
    part = Path(record.spec.root, "parts", manifest_of(record).parts[0].name)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content)
    if lost == "missing":
        part.unlink()
    before.restore()
    for _ in range(10):
        answer_all(redis_client)
        record = step(redis_client, batch)
        assert record.stored_completed + record.stored_failed <= record.completed + record.failed <= 40
        if record.ended:
            break
    assert (record.state, record.completed, record.failed) == ("completed", 40, 0)
    assert record.usage.completion_tokens == 3 * 40


def test_redis_goes_back_just_before_a_part_is_registered(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this drain made one part of many."""
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 60)).id
    step(redis_client, batch)
    step(redis_client, batch)
    drained = Queue.drained

    def drained_too_late(queue: Queue, *arguments: Any) -> bool:
        before.restore()
        monkeypatch.setattr(Queue, "drained", drained)
        return drained(queue, *arguments)

    most_parts = 0
    for _ in range(20):
        before = EarlierRedis(redis_client)
        answer_all(redis_client, most=2)
        monkeypatch.setattr(Queue, "drained", drained_too_late)
        record = step(redis_client, batch)
        listed = manifest_of(record).parts
        most_parts = max(most_parts, len(listed))
        stored = sum(part.lines for part in listed)
        assert sum(map(int.bit_count, Queue(redis_client).done(batch))) == record.completed == stored
    assert len(listed) < most_parts
    assert faults(redis_client) == []


def test_a_part_that_broke_before_redis_came_back_empty(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path)
    part = Path(record.spec.root, "parts", manifest_of(record).parts[0].name)
    part.write_bytes(part.read_bytes()[:-100])
    redis_client.flushall()
    advance._progress.clear()
    serve(redis_client, "m")
    assert rebuild(Queue(redis_client), record.spec.root)
    ended = run_to_end(redis_client, record.id)
    check_every_line_once(redis_client, tmp_path, ended, 20)


@pytest.mark.usefixtures("_no_part_is_small")
def test_parts_are_read_once_where_the_bitmap_is_gone(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = under_way(redis_client, tmp_path)
    (Path(record.spec.root) / NAME).unlink()
    advance._progress.clear()
    reads: list[str] = []
    monkeypatch.setattr(stored_lines, "salvage", lambda root, name: reads.append(name) or salvage(root, name))
    answer_all(redis_client, most=2)
    for _ in range(3):
        step(redis_client, record.id)
        Runner(Queue(redis_client)).flush()
    assert reads == [part.name for part in manifest_of(record).parts[:1]]


@pytest.mark.usefixtures("_no_part_is_small")
def test_a_bitmap_that_cannot_be_written_holds_nothing_up(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = under_way(redis_client, tmp_path)
    (Path(record.spec.root) / NAME).unlink()
    (Path(record.spec.root) / NAME).mkdir()
    check_every_line_once(redis_client, tmp_path, run_to_end(redis_client, record.id), 20)


def test_lines_on_disk_are_not_looked_up_at_each_feed(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has more lines than a window, and Redis came back empty."""
    monkeypatch.setattr(advance, "WINDOW_LINES", 5)
    monkeypatch.setattr(advance, "_MOST_WINDOW_LINES", 5)  # at whatever rate lines finish
    monkeypatch.setattr(advance, "MAX_ITEMS", 5)
    record = under_way(redis_client, folder, count=60, done=8)
    redis_client.flushall()
    advance._progress.clear()
    serve(redis_client, "m")
    assert rebuild(Queue(redis_client), record.spec.root)
    step(redis_client, record.id)
    found: list[Bitmap] = []
    look_up = advance._lines_to_pass_over
    monkeypatch.setattr(advance, "_lines_to_pass_over", lambda *given: found.append(look_up(*given)) or found[-1])
    ended = run_to_end(redis_client, record.id)
    check_every_line_once(redis_client, folder, ended, 60)
    assert len(found) > 3
    assert all(one is found[0] for one in found)
