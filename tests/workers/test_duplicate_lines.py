"""Identical lines of a batch, end to end: real workers answer them from one of them, and what ends
while they wait loses none.

A copy can be told from a line that ran: all of its prompt counts as cached, of which a line that
runs computes the last token at least.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.protocol.requests import Request, RequestKey
from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.redis_server import running_server
from tests.support.requests import ready_length, text_in, token_ids_in
from tests.support.waiting import wait_until
from tests.support.worker_process import running_worker
from tests.workers.test_worker import CHAT, answer, endless, question, run_batch, submit_batch, text_of

pytestmark = pytest.mark.proof

FLAGS = ("--lease-seconds", "30", "--stream-interval", "0.05", "--max-num-seqs", "4")
TOKENS = 60
COPIES = 40  # ten times the engine's slots
LINES: list[dict[str, Any] | bytes] = [endless(TOKENS)] * (1 + COPIES)
SEGFAULT = Poison("wombat", "segfault")
SETTINGS = QueueSettings(lease_seconds=30.0, redis_retry_seconds=60.0)


@pytest.fixture
def queue(redis_client: object, redis_url: str) -> Queue:
    return Queue(connect(redis_url), SETTINGS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Queue, Path]]:
    """The queue of a worker for all tests that leave it as it was, and the file that holds it."""
    hold = tmp_path_factory.mktemp("shared") / "hold"
    with running_server() as server:
        queue = Queue(connect(server.url), SETTINGS)
        with running_worker(queue, server.url, *FLAGS, **held_midway(hold)):
            yield queue, hold


def held_midway(hold: Path) -> dict[str, str]:
    return poisoned_environment(Poison("three", "hold", start=60), hold=hold)


def is_copy(result: Result) -> bool:
    usage = result.usage
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens
    return usage.cached_tokens == usage.prompt_tokens


def copies(results: Iterable[Result]) -> int:
    return sum(map(is_copy, results))


def results_of(queue: Queue, batch: str, lines: int, timeout: float = 120) -> list[Result]:
    """All results, once they are there; a worker that died is one for the ticker."""

    def done() -> bool:
        queue.reap()
        return len(queue.results(batch)) == lines

    wait_until(done, timeout, f"{lines} results")
    assert [line for line, _ in queue.results(batch)] == list(range(lines))
    return [result for _, result in queue.results(batch)]


def wait_all_held(queue: Queue, batch: str, lines: int, published: int) -> None:
    """Until a worker holds all lines, and so many tokens of the first one are published."""
    wait_until(lambda: len(queue.running(batch)) == lines, 60, "all lines to be claimed")
    first = RequestKey(batch, 0)
    wait_until(lambda: tokens_of(queue, first) >= published, 60, "tokens of the line that runs")


def tokens_of(queue: Queue, key: RequestKey) -> int:
    return sum(len(token_ids_in(entry)) for entry in queue.read_tokens({key: FIRST_ID}))


def test_one_line_runs_and_its_copies_and_their_readers_get_what_it_gave(shared: tuple[Queue, Path]) -> None:
    queue, before = shared[0], shared[0].token_totals()
    batch = submit_batch(queue, LINES, watched=True)
    results = results_of(queue, batch, len(LINES))
    others = run_batch(queue, [endless(TOKENS), question("What is 2 + 3?"), endless(TOKENS, logprobs=True)])
    assert copies(results) == COPIES
    assert copies(others) == 0  # of another batch, or other requests
    assert {text_of(result) for result in results} == {text_of(others[0])}
    assert len({answer(result)["id"] for result in results}) == len(LINES)
    assert {result.usage.completion_tokens for result in results} == {TOKENS}
    for line in (1, COPIES):
        entries = queue.read_tokens({RequestKey(batch, line): FIRST_ID})
        assert sum(len(token_ids_in(entry)) for entry in entries) == TOKENS
        assert "".join(map(text_in, entries)) == text_of(results[line])
        assert entries[-1].result == results[line]
    totals = queue.token_totals()
    generated, delivered = totals.generated - before.generated, totals.delivered - before.delivered
    assert generated == delivered == sum(result.usage.completion_tokens for result in [*results, *others])


def test_each_line_runs_where_that_is_asked_for(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--no-deduplicate"):
        assert copies(run_batch(queue, LINES[:6])) == 0


def test_tenants_get_no_answers_of_each_other(queue: Queue, redis_url: str) -> None:
    """Their lines wait before there is a worker, so that one claim has those of both."""
    raw = json.dumps(endless(TOKENS)).encode()
    for tenant in ("one", "other"):
        queue.create_batch(f"batch_of_{tenant}", 4, tenant=tenant, state="in_progress")
        lines = [(line, Request(CHAT, "demo", raw, seed=line)) for line in range(4)]
        assert queue.ingest(f"batch_of_{tenant}", lines, 0, 4)
    with running_worker(queue, redis_url, *FLAGS):
        assert [copies(results_of(queue, f"batch_of_{tenant}", 4)) for tenant in ("one", "other")] == [3, 3]


@pytest.mark.parametrize("how", ["worker killed", *(pytest.param(how) for how in ("core killed", "worker stopped"))])
def test_copies_go_on_when_what_runs_their_original_ends(
    queue: Queue, redis_url: str, tmp_path: Path, how: str
) -> None:
    midway = held_midway(tmp_path / "hold")
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "0", **midway) as first:
        record = first.wait_ready()
        with held(tmp_path / "hold"):
            batch = submit_batch(queue, LINES, watched=True)
            wait_all_held(queue, batch, len(LINES), published=1)
            if how == "worker killed":
                first.kill()
                assert queue.reap(record.id) == len(LINES)
            elif how == "core killed":
                os.kill(first.core_pid, signal.SIGKILL)
            else:
                first.process.terminate()
                wait_until(lambda: ready_length(queue, batch) == len(LINES), 60, "the lines to be requeued")
        with running_worker(queue, redis_url, *FLAGS, ready=how == "worker killed"):
            results = results_of(queue, batch, len(LINES))
            (undisturbed,) = run_batch(queue, [endless(TOKENS)])
    assert {text_of(result) for result in results} == {text_of(undisturbed)}
    assert COPIES - 2 <= copies(results) <= COPIES
    assert queue.batch_fields(batch).failed == 0
    for line in range(len(LINES)):
        assert tokens_of(queue, RequestKey(batch, line)) == TOKENS


def test_a_cancelled_batch_takes_its_copies_along(shared: tuple[Queue, Path]) -> None:
    queue, hold = shared
    with held(hold):
        batch = submit_batch(queue, LINES, watched=True)
        wait_all_held(queue, batch, len(LINES), published=1)
        assert queue.transition(batch, ["in_progress"], "cancelling")
        queue.remove_unfinished(batch)
    assert copies(run_batch(queue, LINES[:3])) == 2
    assert queue.results(batch) == []
    assert queue.running(batch) == []


def test_each_copy_of_a_line_that_fails_has_its_own_error(shared: tuple[Queue, Path]) -> None:
    """The form compiles for none of them."""
    bad = question("x", max_tokens=5, guided_grammar="root ::= nothing_of_that_name")
    results = run_batch(shared[0], [bad, question("x", max_tokens=5), bad, question("x", max_tokens=5), bad])
    assert [result.status for result in results] == [400, 200, 400, 200, 400]
    assert copies([results[1], results[3]]) == 1


@pytest.mark.timeout(600)
def test_copies_of_a_line_that_kills_the_core_are_found(queue: Queue, redis_url: str) -> None:
    """None is in flight while it waits, and none hides behind another: each has its own error. Once
    the first one has crashed a core, the others run beside each other.
    """
    poisonous = question(f"What does a {SEGFAULT.word} eat?")
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(SEGFAULT)) as worker:
        batch = submit_batch(queue, [poisonous] * 3)
        results = results_of(queue, batch, 3, timeout=500)
        assert {(result.status, answer(result)["error"]["code"]) for result in results} == {(500, "engine_crashed")}
        assert "quarantine: running 2 requests in isolation" in worker.log()
        assert copies(run_batch(queue, LINES[:3])) == 2
        worker.wait_ready()
        assert worker.stop() == 0
