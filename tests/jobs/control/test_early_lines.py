"""Lines of a large input run while the rest is validated; no client sees them before the batch is
in progress, and nothing is left of them where it never comes to that.
"""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.client import BatchRecord, cancel_batch, get_batch
from jobs.batch.queued_tokens import others_early_tokens
from jobs.batch.recovery import RestoredProgress
from jobs.control import advance, early_lines, validate
from jobs.control.runner import Runner
from jobs.protocol.lines import read_line
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import chat_line, check_echoes, control_plane, echo, write_input
from tests.support.killed_steps import killed_before_each_step
from tests.support.rollback import EarlierRedis
from tests.support.slow_file import slow_reading
from tests.support.store_batches import lines_of, submit
from tests.support.waiting import wait_until

LINES = 5000
LAST = 4000  # a line far behind the early ones


@pytest.fixture(autouse=True)
def _any_input_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_lines, "_SMALLEST_BYTES", 1)


def source_of(folder: Path, count: int = LINES, end: bytes = b"") -> Path:
    source = write_input(folder / "in.jsonl", count)
    with source.open("ab") as file:
        file.write(end)
    return source


@contextmanager
def validated_meanwhile(client: redis.Redis, batch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Validate in a thread that is held before the last lines until the block is left."""
    with held_validations(client, monkeypatch) as validate_some:
        validate_some(batch)
        yield


@contextmanager
def held_validations(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """What validates batches at once in such threads, and returns when all are held."""
    reached, go_on = threading.Semaphore(0), threading.Event()
    read_lines = validate.read_lines
    threads: list[threading.Thread] = []

    def held_lines(*arguments: Any) -> Iterator[Any]:
        for line in read_lines(*arguments):
            if line.number == LAST:
                reached.release()
                assert go_on.wait(300)
            yield line

    def validate_some(*batches: str) -> None:
        new = [threading.Thread(target=Runner(Queue(client)).run, args=(batch,), daemon=True) for batch in batches]
        threads.extend(new)
        for thread in new:
            thread.start()
        for _ in new:
            assert reached.acquire(timeout=300)

    with monkeypatch.context() as patch:
        patch.setattr(validate, "read_lines", held_lines)
        try:
            yield validate_some
        finally:
            go_on.set()
            for thread in threads:
                thread.join()


def claim(client: redis.Redis, limit: int = 20) -> list[Claim]:
    queue = Queue(client)
    seq = int(client.hget(keys.claim("w"), "seq") or 0) + 1  # type: ignore[arg-type]
    return queue.claim("w", seq, limit, models=["m"])


def commit(client: redis.Redis, claims: list[Claim]) -> int:
    lost = Queue(client).commit("w", [Finished(one.key, one.fence, echo(one)) for one in claims])
    return len(claims) - len(lost)


def change(source: Path) -> None:
    """Give each line another content of the same size."""
    source.write_bytes(source.read_bytes().replace(b'"say ', b'"SAY '))
    os.utime(source, ns=(1, 1))


def killed_with_answers(client: redis.Redis, folder: Path, batch: str, monkeypatch: pytest.MonkeyPatch) -> EarlierRedis:
    """Answer 20 early lines, and leave all as a kill of the validation then does. Return that."""
    manifest = folder / "out.parts" / "manifest.json"
    with validated_meanwhile(client, batch, monkeypatch):
        assert commit(client, claim(client)) == 20
        killed_at = EarlierRedis(client)
        content = manifest.read_bytes()
    killed_at.restore()
    manifest.write_bytes(content)
    return killed_at


def check_nothing_shown(record: BatchRecord, state: str) -> None:
    assert record.state == state
    assert (record.total, record.completed, record.failed, record.waiting, record.running) == (0, 0, 0, 0, 0)
    assert record.usage.prompt_tokens == record.usage.completion_tokens == 0


def check_nothing_left(client: redis.Redis, batch: str) -> None:
    names: Any = client.keys(f"*{batch}*")
    shares = keys.served(keys.ring("m", ""), batch).encode()  # the batch's share, for some minutes
    assert set(names) - {shares} == {keys.batch(batch).encode()}
    assert not client.exists(keys.LEASE, keys.LEASES, keys.TRIES, keys.tenants("m"))


def test_lines_run_while_the_rest_is_validated(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        early = claim(redis_client)
        assert len(early) == 20
        assert commit(redis_client, early[:10]) == 10
        check_nothing_shown(get_batch(redis_client, batch), "validating")
        assert not Queue(redis_client).parts(batch)
        Runner(Queue(redis_client)).flush()
        assert Queue(redis_client).undrained_lines(batch) == 10
    record = get_batch(redis_client, batch)
    assert (record.state, record.total, record.completed) == ("in_progress", LINES, 10)
    assert commit(redis_client, early[10:]) == 10
    assert run_to_end(redis_client, batch).completed == LINES
    check_echoes(tmp_path / "out.jsonl", LINES)


def test_all_lines_count_as_unfinished_as_soon_as_the_first_ones_run(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, batch = Queue(redis_client), begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        for answered in (0, 64, 500):
            assert commit(redis_client, claim(redis_client, answered)) == answered
            # An estimate: short lines are longer in Redis than in the file
            assert LINES / 2 < queue.unfinished(["m"])["m"] < 2 * LINES
        assert queue.unfinished(["other"]) == {"other": 0}
    assert queue.unfinished(["m"]) == {"m": LINES - 564}


def test_lines_of_a_batch_that_is_refused_or_cancelled_count_no_more(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(redis_client)
    refused = begin(redis_client, source_of(tmp_path / "refused", end=b"not json\n")).id
    with validated_meanwhile(redis_client, refused, monkeypatch):
        assert queue.unfinished(["m"])["m"] > LINES / 2
    assert queue.unfinished(["m"]) == {"m": 0}
    cancelled = begin(redis_client, source_of(tmp_path / "cancelled")).id
    with validated_meanwhile(redis_client, cancelled, monkeypatch):
        cancel_batch(redis_client, cancelled)
        assert queue.unfinished(["m"]) == {"m": 0}


def test_early_lines_leave_room_for_the_plan(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        waiting = Queue(redis_client).window_lines(batch)
        assert 64 <= waiting <= advance.WINDOW_LINES // 2
    assert Queue(redis_client).batch_fields(batch).low_water > 0


def test_lines_of_more_tokens_than_may_be_queued_are_removed(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit(redis_client, tmp_path, lines_of(LINES), tenant="t", queued_tokens=2000)
    with validated_meanwhile(redis_client, submitted.id, monkeypatch):
        assert Queue(redis_client).window_lines(submitted.id) == 0
    record = get_batch(redis_client, submitted.id)
    assert (record.state, [problem.code for problem in record.errors]) == ("failed", ["token_limit_exceeded"])


PLAIN_LINES = [chat_line(f"c{number}", f"say {number:06}") for number in range(LINES)]
LINE_TOKENS = len(read_line(PLAIN_LINES[0]).body) / 4


def submit_bounded(client: redis.Redis, folder: Path, count: int = LINES) -> BatchRecord:
    """A batch of so many lines, for a tenant that may have the tokens of `LINES` in queue."""
    content = b"".join(PLAIN_LINES[:count])
    return submit(client, folder, content, tenant="t", queued_tokens=math.ceil(LINES * LINE_TOKENS))


@pytest.mark.parametrize("at_once", [False, True])
def test_batches_that_are_validated_at_once_count_the_early_lines_of_each_other(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr(early_lines, "_MOST_LINES", LINES)
    queue = Queue(redis_client)
    batches = [submit_bounded(redis_client, tmp_path).id for _ in range(3)]
    with held_validations(redis_client, monkeypatch) as validate_some:
        for some in [batches] if at_once else [[one] for one in batches]:
            validate_some(*some)
        waiting = [queue.window_lines(batch) for batch in batches]
        assert 64 <= sum(waiting) <= LINES
        for batch, lines in zip(batches, waiting, strict=True):
            assert queue.batch_fields(batch).early_tokens >= lines * LINE_TOKENS
    assert {get_batch(redis_client, batch).state for batch in batches} <= {"in_progress", "failed"}


def test_early_lines_of_others_refuse_no_batch(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those may still be refused themselves."""
    monkeypatch.setattr(early_lines, "_MOST_LINES", LINES)
    large = submit_bounded(redis_client, tmp_path).id
    small = submit_bounded(redis_client, tmp_path, LAST - 1).id
    with validated_meanwhile(redis_client, large, monkeypatch):
        assert step(redis_client, small).state == "in_progress"
    assert get_batch(redis_client, large).state == "failed"
    assert others_early_tokens(Queue(redis_client), "t", small) == 0


def test_early_lines_that_were_removed_count_no_more(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"".join([*PLAIN_LINES[:1000], b"not json\n", *PLAIN_LINES[1000:]])
    batch = submit(redis_client, tmp_path, content, tenant="t").id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        assert get_batch(redis_client, batch).state == "validating"
        assert others_early_tokens(Queue(redis_client), "t", "") == 0


@pytest.mark.parametrize(("tenant", "is_counted"), [("", False), ("t", True)])
def test_early_lines_are_counted_where_a_key_may_limit_them(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenant: str, is_counted: bool
) -> None:
    """Here a key without limits of its own, as another one of the tenant may have some."""
    queue, batch = Queue(redis_client), submit(redis_client, tmp_path, b"".join(PLAIN_LINES), tenant=tenant).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        assert queue.window_lines(batch) >= 64
        assert (queue.batch_fields(batch).early_tokens > 0) is is_counted
    assert get_batch(redis_client, batch).state == "in_progress"


@pytest.mark.proof
def test_early_lines_are_counted_before_they_are_given_out(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Whatever step a pass is killed before, and the next one goes on from."""
    batch, hit = submit_bounded(redis_client, tmp_path, 2000).id, 0

    def run() -> None:
        Runner(Queue(connect(redis_url))).run(batch)

    for _ in killed_before_each_step(run):
        fields, waiting = Queue(redis_client).batch_fields(batch), Queue(redis_client).window_lines(batch)
        hit += fields.state == "validating" and waiting > 64
        assert waiting * LINE_TOKENS <= max(fields.early_tokens, fields.queued_tokens)
    assert hit > 3


def test_lines_that_share_a_prefix_are_neighbors(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(chat_line(f"c{n}", "ab"[n % 2] * 100 + str(n)) for n in range(LINES)))
    batch = begin(redis_client, source).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        windows = [claim(redis_client, 64)]
        while claims := claim(redis_client, 500):
            windows.append(claims)
    left = LINES - sum(map(len, windows))
    rest: list[Claim] = []
    while len(rest) < left:
        step(redis_client, batch)
        rest += claim(redis_client, 500)
    prefixes = [[one.key.line % 2 for one in claims] for claims in (*windows, rest)]
    assert [len(list(itertools.groupby(lines))) for lines in prefixes] == [2] * len(prefixes)
    assert len(windows[0]) < len(windows[1]) < left  # so each has fewer breaks by line


@pytest.mark.parametrize("end", [b"not json\n", chat_line("c1")])
def test_a_refused_file_leaves_nothing(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    batch = begin(redis_client, source_of(tmp_path, end=end), key_id="key_1").id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        early = claim(redis_client)
        assert commit(redis_client, early[:10]) == 10
    record = get_batch(redis_client, batch)
    check_nothing_shown(record, "failed")
    usages = [echo(one).usage for one in early[:10]]
    counted = Queue(redis_client).key_usage()["key_1"]
    assert counted["prompt_tokens"] == sum(usage.prompt_tokens for usage in usages) > 0
    assert counted["completion_tokens"] == sum(usage.completion_tokens for usage in usages) > 0
    assert [problem.line for problem in record.errors] == [LINES + 1]
    assert commit(redis_client, early[10:]) == 0
    assert claim(redis_client) == []
    check_nothing_shown(get_batch(redis_client, batch), "failed")
    fields: Any = redis_client.hmget(keys.batch(batch), "completed", "failed", "result_bytes", "used_tokens", "early")
    assert [int(value or 0) for value in fields] == [0, 0, 0, 0, 0]
    redis_client.delete(keys.claim("w"))
    check_nothing_left(redis_client, batch)


def test_a_bad_line_ends_the_early_ones_at_once(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    lines = [chat_line(f"c{number}") for number in range(LINES)]
    lines[1000] = b"not json\n"
    source.write_bytes(b"".join(lines))
    batch = begin(redis_client, source).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        assert claim(redis_client) == []
    check_nothing_shown(get_batch(redis_client, batch), "failed")


def expire(client: redis.Redis, batch: str) -> None:
    assert Queue(client).transition(
        batch, ["validating"], "finalizing", {"outcome": "expired", "timestamps": {"finalizing": time.time()}}
    )


@pytest.mark.parametrize(("end", "state"), [(cancel_batch, "cancelled"), (expire, "expired")])
def test_a_batch_that_ends_while_it_is_validated_has_no_lines(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[redis.Redis, str], object],
    state: str,
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        early = claim(redis_client)
        assert commit(redis_client, early[:10]) == 10
        end(redis_client, batch)
        commit(redis_client, early[10:])
        record = get_batch(redis_client, batch)
        check_nothing_shown(record, record.state)
    check_nothing_shown(step(redis_client, batch), state)
    assert commit(redis_client, early) == 0
    assert not (tmp_path / "out.jsonl").exists()
    redis_client.delete(keys.claim("w"))
    check_nothing_left(redis_client, batch)


def test_a_full_redis_takes_no_early_lines_and_stops_no_validation(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    redis_client.config_set("maxmemory", "1")
    with validated_meanwhile(redis_client, batch, monkeypatch):
        assert get_batch(redis_client, batch).state == "validating"
        assert Queue(redis_client).window_lines(batch) == 0
        redis_client.config_set("maxmemory", "0")
    assert get_batch(redis_client, batch).state == "in_progress"
    assert run_to_end(redis_client, batch).completed == LINES
    check_echoes(tmp_path / "out.jsonl", LINES)


def test_early_results_that_fill_redis_are_drained_before_the_plan_is_fed(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        large = Result(200, b'{"text": "%s"}' % (b"x" * 400_000), Usage(1, 1, 0), "req_1")
        claims = claim(redis_client)
        assert Queue(redis_client).commit("w", [Finished(one.key, one.fence, large) for one in claims]) == []
        used: Any = redis_client.info("memory")
        redis_client.config_set("maxmemory", used["used_memory"] - 4_000_000)
    redis_client.config_set("maxmemory", 0)
    queue = Queue(redis_client)
    assert sum(queue.parts(batch).values()) == 20
    assert queue.batch_fields(batch).low_water > 0


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_validation_keeps_the_lines_of_the_same_input_only(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    source = source_of(tmp_path)
    batch = begin(redis_client, source).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        early = claim(redis_client)
        assert commit(redis_client, early[:10]) == 10
        held_at = EarlierRedis(redis_client)
        folder = tmp_path / "out.parts" / "manifest.json"
        manifest = folder.read_bytes() if folder.exists() else None
    held_at.restore()  # as a kill at this moment leaves it
    if manifest is not None:
        folder.write_bytes(manifest)
    if changed:
        change(source)
    record = step(redis_client, batch)
    assert (record.state, record.completed) == ("in_progress", 0 if changed else 10)
    assert commit(redis_client, early[10:]) == (0 if changed else 10)
    assert run_to_end(redis_client, batch).completed == LINES
    text = (tmp_path / "out.jsonl").read_text()
    assert (text.count("SAY "), text.count("say ")) == ((LINES, 0) if changed else (0, LINES))


@pytest.mark.parametrize(("end", "state"), [(cancel_batch, "cancelled"), (expire, "expired")])
def test_no_answer_to_a_line_of_an_earlier_input_is_in_the_results(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[redis.Redis, str], object],
    state: str,
) -> None:
    source = source_of(tmp_path)
    batch = begin(redis_client, source).id
    held_at = killed_with_answers(redis_client, tmp_path, batch, monkeypatch)
    change(source)
    assert step(redis_client, batch).state == "in_progress"
    held_at.restore()
    end(redis_client, batch)
    record = run_to_end(redis_client, batch)
    assert (record.state, record.total, record.completed) == (state, LINES, 0)
    assert "say " not in (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize("end", [cancel_batch, None])
def test_answers_stay_where_the_source_is_only_touched(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[redis.Redis, str], object] | None,
) -> None:
    source = source_of(tmp_path)
    batch = begin(redis_client, source).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        assert commit(redis_client, claim(redis_client)) == 20
    os.utime(source, ns=(1, 1))
    answered = 20
    while Queue(redis_client).window_lines(batch) > 100:
        answered += commit(redis_client, claim(redis_client, 500))
    step(redis_client, batch)  # feeds more, of the touched source
    answered += commit(redis_client, claim(redis_client, 500))
    if end is not None:
        end(redis_client, batch)
    assert run_to_end(redis_client, batch).completed == (LINES if end is None else answered)


def test_a_redis_that_went_back_to_the_validation_counts_each_line_once(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = begin(redis_client, source_of(tmp_path)).id
    with validated_meanwhile(redis_client, batch, monkeypatch):
        early = claim(redis_client)
        assert commit(redis_client, early[:10]) == 10
        earlier = EarlierRedis(redis_client)
    answer_all(redis_client, most=500)
    step(redis_client, batch)
    assert Queue(redis_client).parts(batch)
    earlier.restore()
    record = run_to_end(redis_client, batch)
    assert (record.completed, record.failed) == (LINES, 0)
    check_echoes(tmp_path / "out.jsonl", LINES)


def test_a_redis_that_goes_back_before_the_batch_is_in_progress_keeps_no_lines_of_another_input(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look at them, to the pass before, which was killed."""
    source = source_of(tmp_path)
    batch = begin(redis_client, source).id
    killed_at = killed_with_answers(redis_client, tmp_path, batch, monkeypatch)
    change(source)
    restore_progress = validate.restore_progress

    def goes_back(*arguments: Any) -> RestoredProgress:
        killed_at.restore()
        return restore_progress(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(validate, "restore_progress", goes_back)
        assert step(redis_client, batch).state == "validating"
    record = step(redis_client, batch)
    assert (record.state, record.completed) == ("in_progress", 0)
    assert run_to_end(redis_client, batch).completed == LINES
    assert (tmp_path / "out.jsonl").read_text().count("SAY ") == LINES


@pytest.mark.proof
@pytest.mark.parametrize("end", [b"", b"not json\n"])
def test_a_kill_before_any_step_changes_nothing(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, end: bytes
) -> None:
    source = source_of(tmp_path, 800, end)
    batch = begin(redis_client, source).id
    hit = 0

    def run() -> None:
        Runner(Queue(connect(redis_url))).run(batch)

    for _ in killed_before_each_step(run):
        fields = Queue(redis_client).batch_fields(batch)
        hit += fields.state == "validating" and bool(fields.early)
        if fields.state == "validating":
            commit(redis_client, claim(redis_client, 1))
    assert hit > 3
    record = run_to_end(redis_client, batch)
    if end:
        check_nothing_shown(record, "failed")
    else:
        assert record.completed == 800
        check_echoes(tmp_path / "out.jsonl", 800)


def test_a_control_plane_gives_lines_out_before_it_has_read_all(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(chat_line(f"c{n}", "x" * 2000) for n in range(30_000)))
    with control_plane(redis_url, environment=slow_reading(source, 0.005)):
        batch = begin(redis_client, source).id
        wait_until(lambda: redis_client.exists(keys.bodies(batch)), 120, "an early line")
        early = claim(redis_client)
        assert commit(redis_client, early[:1]) == 1
        check_nothing_shown(get_batch(redis_client, batch), "validating")
        cancel_batch(redis_client, batch)
        wait_until(lambda: get_batch(redis_client, batch).ended, 120, "its end")
    assert commit(redis_client, early) == 0
    check_nothing_shown(get_batch(redis_client, batch), "cancelled")
