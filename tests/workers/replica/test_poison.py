"""Requests that kill or hang the engine core: each is found and gets its error, and no other
notices more than a pause.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from jobs.protocol.requests import StreamEntry
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.server import PrivateServer
from tests.pipeline.results import answers, custom_ids, read_results
from tests.pipeline.results import text_of as text_of_line
from tests.support.commands import EXAMPLES, run_pipeline
from tests.support.integrity import faults
from tests.support.poison import Poison, poisoned_environment
from tests.support.requests import ready_length
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from tests.workers.test_worker import answer, endless, follow, question, run_batch, submit_batch, submit_live, text_of
from workers.engine.client.watchdog import MIN_TIMEOUT
from workers.replica.requeue import GOODBYE_SECONDS

FLAGS = ("--lease-seconds", "2", "--stream-interval", "0.05", "--max-num-seqs", "16")
SOON_HUNG = (*FLAGS, "--step-timeout", "5")
# In which a test does something to a worker whose step hangs
LATER_HUNG = (*FLAGS, "--step-timeout", "10")
SEGFAULT = Poison("crocodile", "segfault")
EXCEPTION = Poison("rhinoceros", "exception")
HANG = Poison("hibernation", "hang")
EXIT = Poison("departure", "exit")
OUTAGE = 2 * GOODBYE_SECONDS  # longer than a stopping worker waits, and a call tries again
# For which a step must have been held up for eight seconds, on whatever machine
MOST_LEARNED = 4 * MIN_TIMEOUT
LATE = Poison("procrastination", "segfault", start=70)
WORDS = {
    "segfault": "was ended by SIGSEGV",
    "exception": "ended with status 1: ValueError: the arithmetic went wrong",
    "hang": "its step hung",
    "exit": "ended with status 3",
}


@pytest.fixture
def queue(redis_client: object, redis_url: str) -> Queue:
    return Queue(connect(redis_url), QueueSettings(lease_seconds=2.0, redis_retry_seconds=60.0))


def poisoned(poison: Poison, **parameters: object) -> dict[str, object]:
    return question(f"What does a {poison.word} eat?", **parameters)


def innocents(count: int) -> list[dict[str, object]]:
    return [question(f"What is {n} + 30?", max_tokens=20 + n % 7) for n in range(count)]


def assert_dead_lettered(result: Result, poison: Poison) -> None:
    error = answer(result)["error"]
    assert (result.status, error["type"], error["code"]) == (500, "server_error", "engine_crashed")
    assert WORDS[poison.harm] in error["message"]


def assert_found(queue: Queue, batch: str, expected: list[str], poisonous: dict[int, Poison]) -> None:
    """Every line has its end: the poisonous their errors, the others the answers they have
    undisturbed, in the order of `expected`.
    """
    results = dict(queue.results(batch))
    assert [text_of(result) for line, result in sorted(results.items()) if line not in poisonous] == expected
    for line, poison in poisonous.items():
        assert_dead_lettered(results[line], poison)
    record = queue.batch_fields(batch)
    assert (record.completed, record.failed) == (len(expected), len(poisonous))


def wait_done(queue: Queue, batch: str, lines: int, timeout: float = 120.0) -> None:
    wait_until(partial(is_done, queue, batch, lines), timeout, "all results")


def is_done(queue: Queue, batch: str, lines: int) -> bool:
    return len(queue.results(batch)) == lines


def find_one(
    queue: Queue, redis_url: str, poison: Poison, count: int, flags: tuple[str, ...], **parameters: object
) -> float:
    """One poison in the middle of `count` innocents; returns how many seconds it took to find it,
    and everybody to end.

    Without those in which cores start, one for each death, and without what a hung one is waited
    for beyond the shortest time because some step before was held up: how long that takes says more
    of the machine than of the search.
    """
    environment = poisoned_environment(poison)
    with running_worker(queue, redis_url, *flags, **environment) as worker:
        bodies = innocents(count)
        expected = [text_of(result) for result in run_batch(queue, [*bodies])]
        bodies.insert(count // 2, poisoned(poison, **parameters))
        began = time.monotonic()
        batch = submit_batch(queue, [*bodies])
        wait_done(queue, batch, count + 1, 240)
        seconds = time.monotonic() - began
        assert_found(queue, batch, expected, {count // 2: poison})
        assert faults(queue.redis) == []
        assert worker.stop() == 0
        _first, *starts = (float(start) for start in re.findall(r"ready after ([\d.]+) s", worker.log()))
        silences = [float(silence) for silence in re.findall(r"nothing came in ([\d.]+) s", worker.log())]
    assert all(silence <= MOST_LEARNED for silence in silences), silences
    return seconds - sum(starts) - sum(max(0.0, silence - MIN_TIMEOUT) for silence in silences)


@pytest.mark.proof
def test_a_request_that_kills_the_core_gets_its_error_and_the_innocent_their_answers(
    queue: Queue, redis_url: str
) -> None:
    find_one(queue, redis_url, SEGFAULT, 20, FLAGS)


@pytest.mark.proof
@pytest.mark.parametrize("poison", [EXCEPTION, HANG, EXIT], ids=lambda poison: poison.harm)
def test_every_kind_of_harm_is_found(queue: Queue, redis_url: str, poison: Poison) -> None:
    find_one(queue, redis_url, poison, 20, SOON_HUNG if poison is HANG else FLAGS)


@pytest.mark.proof
def test_a_request_that_does_harm_late_is_found_after_it_was_released(queue: Queue, redis_url: str) -> None:
    find_one(queue, redis_url, LATE, 10, FLAGS, max_tokens=100, ignore_eos=True)


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.parametrize("poison", [SEGFAULT, HANG], ids=lambda poison: poison.harm)
def test_one_among_256_is_found_within_two_minutes_with_the_defaults(
    queue: Queue, redis_url: str, poison: Poison
) -> None:
    seconds = find_one(queue, redis_url, poison, 256, ())
    print(f"found after {seconds:.0f} s, beside the starts of cores")
    assert seconds < 110


@pytest.mark.proof
def test_two_of_them_are_both_found(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(SEGFAULT, EXCEPTION)) as worker:
        bodies = innocents(40)
        expected = [text_of(result) for result in run_batch(queue, [*bodies])]
        bodies.insert(3, poisoned(SEGFAULT))
        bodies.insert(30, poisoned(EXCEPTION))
        batch = submit_batch(queue, [*bodies])
        wait_done(queue, batch, 42)
        assert_found(queue, batch, expected, {3: SEGFAULT, 30: EXCEPTION})
        assert worker.stop() == 0


@pytest.mark.proof
def test_deaths_in_isolation_come_more_slowly_the_longer_none_is_released(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(SEGFAULT)) as worker:
        batch = submit_batch(queue, [poisoned(SEGFAULT, seed=line) for line in range(2)])
        wait_done(queue, batch, 2)
        wait_until(
            lambda: " in 2 s\n" in worker.log(), 60, "the log line of the last crash, which comes after the results"
        )
        worker.wait_ready()
        assert_found(queue, batch, [], {0: SEGFAULT, 1: SEGFAULT})
        log = worker.log()
        pauses = ("\n", " in 1 s\n", " in 2 s\n")
        assert [log.count(f"starting another engine core{pause}") for pause in pauses] == [2, 1, 1]
        assert worker.stop() == 0


@pytest.mark.proof
def test_a_poisonous_live_call_gets_a_500_and_the_streams_beside_it_go_on(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(SEGFAULT)):
        (undisturbed,) = run_batch(queue, [endless(600)])
        calls = [submit_live(queue, endless(600)) for _ in range(4)]
        for _, api in calls:
            follow(queue, api, until=3)
        _, poisonous = submit_live(queue, poisoned(SEGFAULT))
        for _, api in calls:
            assert_seamless(follow(queue, api), text_of(undisturbed))
        dead_letter = follow(queue, poisonous)[-1].result
        assert dead_letter is not None
        assert_dead_lettered(dead_letter, SEGFAULT)


def assert_seamless(entries: list[StreamEntry], text: str) -> None:
    """Every token and character once, in order."""
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    tokens = characters = 0
    for chunk in chunks:
        assert (chunk.index, chunk.text_offset) == (tokens, characters)
        tokens += len(chunk.token_ids)
        characters += len(chunk.text)
    assert "".join(chunk.text for chunk in chunks) == text


@pytest.mark.proof
def test_no_request_is_dead_lettered_for_cores_that_were_killed(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(Poison("three", "slow"))) as worker:
        (undisturbed,) = run_batch(queue, [endless(300)])
        batch = submit_batch(queue, [endless(300)])
        record = None
        for _ in range(4):
            record = worker.wait_ready(instead_of=record)
            wait_until(partial(is_held, queue, record.id), 60, "the request to be claimed")
            os.kill(worker.core_pid, signal.SIGKILL)
        wait_done(queue, batch, 1)
        assert_found(queue, batch, [text_of(undisturbed)], {})


def is_held(queue: Queue, worker: str) -> bool:
    return bool(queue.redis.exists(keys.held(worker)))


def wait_for_isolated_run(worker: WorkerProcess) -> None:
    wait_until(lambda: "requests in isolation" in worker.log(), 60, "an isolated run")


@pytest.mark.proof
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_worker_that_ends_in_isolation_leaves_it_to_the_next(
    queue: Queue, redis_url: str, how: signal.Signals
) -> None:
    environment = poisoned_environment(HANG)
    bodies = innocents(10)
    with running_worker(queue, redis_url, *LATER_HUNG, **environment) as first:
        expected = [text_of(result) for result in run_batch(queue, [*bodies])]
        bodies.insert(2, poisoned(HANG))
        batch = submit_batch(queue, [*bodies])
        wait_for_isolated_run(first)  # which hangs for as long as a step may
        first.process.send_signal(how)
        assert first.process.wait(60) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
        # Also one that could not renew its record for a while
        for worker in queue.redis.hkeys(keys.WORKERS):
            queue.remove_worker(worker.decode())
    assert queue.redis.zcard(keys.quarantined("demo")) == 11
    with running_worker(queue, redis_url, *SOON_HUNG, **environment):
        wait_done(queue, batch, 11)
        assert_found(queue, batch, expected, {2: HANG})


@pytest.mark.proof
def test_a_busy_worker_makes_room_for_quarantined_that_wait(queue: Queue, redis_url: str) -> None:
    quarantined = submit_batch(queue, [*innocents(3)])
    claims = queue.claim("gone", 1, 3, models=["demo"])
    with running_worker(
        queue, redis_url, *FLAGS, "--lease-seconds", "60", **poisoned_environment(Poison("three", "slow"))
    ) as worker:
        busy = submit_batch(queue, [endless(600, seed=line) for line in range(4)])  # half a minute
        wait_until(lambda: len(queue.running(busy)) == 4, 60, "the worker to be busy")
        queue.quarantine("gone", [(claim.key, claim.fence) for claim in claims], Result(500, b"{}", Usage(0, 0, 0), ""))
        wait_until(lambda: queue.reap() + len(queue.results(quarantined)) == 3, 60, "the quarantined requests' answers")
        assert queue.results(busy) == []
        assert "quarantine: requeued 4 requests to make room for quarantined ones" in worker.log()
        wait_done(queue, busy, 4)
        assert queue.batch_fields(busy).failed == 0


@pytest.mark.proof
def test_a_release_from_quarantine_is_repeated_until_redis_has_it(tmp_path: Path) -> None:
    """The leases outlast the test: a request whose release Redis did not record stays quarantined
    there.
    """
    with PrivateServer(tmp_path) as server:
        queue = Queue(connect(server.url), QueueSettings(lease_seconds=600.0, redis_retry_seconds=60.0))
        batch = submit_batch(queue, [endless(40, seed=line) for line in range(3)])
        claims = queue.claim("gone", 1, 3, models=["demo"])
        with running_worker(queue, server.url, *FLAGS, "--lease-seconds", "600") as worker:
            core = worker.core_pid
            os.kill(core, signal.SIGSTOP)  # the isolated run cannot end before Redis has
            queue.quarantine(
                "gone", [(claim.key, claim.fence) for claim in claims], Result(500, b"{}", Usage(0, 0, 0), "")
            )
            wait_for_isolated_run(worker)
            server.stop()
            os.kill(core, signal.SIGCONT)
            time.sleep(OUTAGE)
            server.start()
            wait_done(queue, batch, 3)
            assert queue.batch_fields(batch).failed == 0
            assert "their leases expired" not in worker.log()
            assert worker.stop() == 0


def last_error(worker: WorkerProcess) -> str:
    """Why it ended; what its core wrote may come later."""
    (error,) = (line for line in worker.log().splitlines() if line.startswith("Error: "))
    return error


@pytest.mark.proof
def test_a_worker_whose_device_fails_at_everything_has_no_request_dead_lettered(queue: Queue, redis_url: str) -> None:
    batch = submit_batch(queue, [*innocents(5)])
    with running_worker(
        queue, redis_url, *FLAGS, ready=False, **poisoned_environment(Poison("", "segfault"))
    ) as worker:
        assert worker.process.wait(200) == 2
        assert "6 engine cores in a row have died" in last_error(worker)
    assert ready_length(queue, batch) == 5
    assert queue.redis.exists(keys.quarantined("demo")) == 0


@pytest.mark.proof
def test_a_worker_whose_device_fails_at_more_than_a_few_tokens_has_no_request_dead_lettered(
    queue: Queue, redis_url: str
) -> None:
    """The first core is found fit, by a request that is shorter, and takes all three with it."""
    batch = submit_batch(queue, [*innocents(3)])
    with running_worker(
        queue, redis_url, *FLAGS, ready=False, **poisoned_environment(Poison("", "segfault", start=20))
    ) as worker:
        assert worker.process.wait(200) == 1
        last = last_error(worker)
        assert "the device or the installation is at fault, not a request" in last
        assert "6 engine cores in a row have died" in last
    assert queue.results(batch) == []
    assert queue.redis.zcard(keys.quarantined("demo")) == 3
    with running_worker(queue, redis_url, *FLAGS):
        wait_done(queue, batch, 3)
    assert all(result.succeeded for _, result in queue.results(batch))


@pytest.mark.proof
def test_a_poisoned_line_ends_no_run(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()[:20]]
    rows[7]["body"]["messages"] = [{"role": "user", "content": f"What does a {SEGFAULT.word} eat?"}]
    source, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_pipeline("run-batch", source, "-o", output, timeout=280, **poisoned_environment(SEGFAULT))
    assert done.returncode == 0, done.stderr
    results = read_results(output)
    assert [result["custom_id"] for result in results] == custom_ids(source)
    dead_letter = results.pop(7)["response"]
    assert (dead_letter["status_code"], dead_letter["body"]["error"]["code"]) == (500, "engine_crashed")
    right = answers()
    assert all(text_of_line(result) == right[result["custom_id"]] for result in results)
    assert "1 failed" in done.stdout
