"""What happens to requests when something ends: the worker, its engine core, Redis, or the worker's
patience.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.protocol.requests import RequestKey
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID
from jobs.server import PrivateServer
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import is_running, send_all
from tests.support.requests import ready_length, text_in, token_ids_in
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from tests.workers.test_worker import endless, follow, question, run_batch, submit_batch, submit_live, text_of
from workers.settings import DEMO_MODEL
from workers.worker import MAX_ENGINE_RESTARTS, Deaths

pytestmark = pytest.mark.proof

FLAGS = ("--lease-seconds", "1", "--stream-interval", "0.05", "--max-num-seqs", "8")
TOKENS = 400
# A word of `endless`: its requests get 20 tokens a second at most
SLOW = poisoned_environment(Poison("three", "slow"))


@pytest.fixture
def queue(redis_client: object, redis_url: str) -> Queue:
    return Queue(connect(redis_url), QueueSettings(lease_seconds=1.0, redis_retry_seconds=60.0))


def published(queue: Queue, key: RequestKey) -> int:
    return sum(len(token_ids_in(entry)) for entry in queue.read_tokens({key: FIRST_ID}))


def wait_published(queue: Queue, key: RequestKey, tokens: int) -> None:
    wait_until(lambda: published(queue, key) >= tokens, 60, f"{tokens} published tokens")


def test_the_next_worker_goes_on_where_a_killed_one_was(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS) as second:
        (undisturbed,) = run_batch(queue, [endless(TOKENS)])
        (by_chance,) = run_batch(queue, [endless(TOKENS, temperature=1.0, seed=5)])
        second.process.send_signal(signal.SIGSTOP)  # so that the first one gets the work
        with running_worker(queue, redis_url, *FLAGS, **SLOW) as first:
            batch = submit_batch(queue, [endless(TOKENS), endless(TOKENS, temperature=1.0, seed=5)])
            wait_published(queue, RequestKey(batch, 0), 40)
            wait_published(queue, RequestKey(batch, 1), 40)
            record = first.wait_ready()
            first.kill()
            had = published(queue, RequestKey(batch, 0))
            assert queue.reap(record.id) == 2
        second.process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(queue.results(batch)) == 2, 60, "the results")
        greedy, sampled = (result for _, result in queue.results(batch))
    assert 40 <= had < TOKENS
    assert text_of(greedy) == text_of(undisturbed)
    assert text_of(sampled) == text_of(by_chance)
    assert greedy.usage.completion_tokens == TOKENS


def test_a_live_stream_goes_on_over_the_death_of_its_worker(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **SLOW) as worker:
        key, api = submit_live(queue, endless(TOKENS))
        wait_published(queue, key, 40)
        worker_id = worker.wait_ready().id
        worker.kill()
        queue.reap(worker_id)
    with running_worker(queue, redis_url, *FLAGS):
        entries = follow(queue, api)
        _, undisturbed_api = submit_live(queue, endless(TOKENS))
        whole = "".join(text_in(entry) for entry in follow(queue, undisturbed_api))
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    assert [chunk.index for chunk in chunks] == [
        0,
        *itertools.accumulate(len(chunk.token_ids) for chunk in chunks[:-1]),
    ]
    assert [chunk.text_offset for chunk in chunks] == [
        0,
        *itertools.accumulate(len(chunk.text) for chunk in chunks[:-1]),
    ]
    assert "".join(chunk.text for chunk in chunks) == whole


def test_a_dead_engine_core_is_replaced_and_its_requests_go_on(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **SLOW) as worker:
        (undisturbed,) = run_batch(queue, [endless(60)])
        batch = submit_batch(queue, [endless(60)], watched=True)
        wait_published(queue, RequestKey(batch, 0), 10)
        before = worker.core_pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: len(queue.results(batch)) == 1, 60, "the result")
        assert worker.core_pid != before
        assert text_of(queue.results(batch)[0][1]) == text_of(undisturbed)
        worker.wait_ready()
        assert worker.stop() == 0


def test_a_core_that_cannot_be_replaced_at_once_is_replaced_later(queue: Queue, redis_url: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.symlink_to(DEMO_MODEL)
    with running_worker(queue, redis_url, *FLAGS, "--model", str(model)) as worker:
        record = worker.wait_ready()
        model.unlink()
        os.kill(worker.core_pid, signal.SIGKILL)
        wait_until(lambda: "starting another engine core in 1 s" in worker.log(), 60, "a core that cannot start")
        model.symlink_to(DEMO_MODEL)
        worker.wait_ready(instead_of=record)
        assert worker.stop() == 0


def test_a_core_that_refuses_the_workers_own_request_is_replaced(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, ready=False, **poisoned_environment(Poison("", "memory"))) as worker:
        wait_until(lambda: "starting another engine core in 1 s" in worker.log(), 120, "two cores that fail")
        assert worker.stop() == 0
        assert "failed at the first request" in worker.log()
        assert "Traceback" not in worker.log()


def test_a_worker_whose_cores_keep_dying_gives_up(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **SLOW) as worker:
        batch = submit_batch(queue, [endless(1900)])
        record = None
        for death in range(MAX_ENGINE_RESTARTS + 1):
            record = worker.wait_ready(instead_of=record)
            os.kill(worker.core_pid, signal.SIGKILL)
            if death == MAX_ENGINE_RESTARTS - 1:
                wait_until(
                    lambda: worker.state == "loading" and not worker.has_core,
                    60,
                    "the worker to be known in the longest pause",
                )
        assert worker.process.wait(60) == 1
        log = worker.log()
        assert "6 engine cores in a row have died; not starting another" in log
        pauses = ("\n", " in 1 s\n", " in 2 s\n", " in 4 s\n", " in 8 s\n")
        assert [log.count(f"starting another engine core{pause}") for pause in pauses] == [1] * 5
        assert "Traceback" not in log
        assert worker.record is None
        assert ready_length(queue, batch) == 1


def test_crashes_in_isolation_that_released_none_make_pauses_but_end_no_worker() -> None:
    deaths = Deaths()
    nothing = {"answered": False, "cleared": False}
    assert deaths.count(isolated=False, **nothing) == 0
    assert [deaths.count(isolated=True, **nothing) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 32, 32]
    assert deaths.count(isolated=False, **nothing) == 1
    assert deaths.count(isolated=True, answered=False, cleared=True) == 0
    assert deaths.in_a_row == 2
    assert deaths.count(isolated=True, **nothing) == 1
    assert deaths.count(isolated=False, answered=True, cleared=False) == 0
    assert deaths.in_a_row == 1


def test_an_answer_between_two_deaths_makes_them_no_row(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS) as worker:
        record = None
        for _ in range(3):  # the second in a row would make a pause
            record = worker.wait_ready(instead_of=record)
            run_batch(queue, [question("What is 2 + 3?")])
            os.kill(worker.core_pid, signal.SIGKILL)
        worker.wait_ready(instead_of=record)
        assert " in 1 s" not in worker.log()


def test_sigterm_hands_back_what_cannot_finish_without_counting_an_attempt(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "0", **SLOW) as worker:
        batch = submit_batch(queue, [endless(TOKENS, seed=line) for line in range(12)])  # more than run at once
        for line in range(8):
            wait_published(queue, RequestKey(batch, line), 20)
        assert worker.stop() == 0
    # Which is shown for a moment
    assert {worker.state for worker in queue.workers()} <= {"stopped"}
    claims = queue.claim("test", 1, 20, models=["demo"])
    assert [claim.key.line for claim in claims] == list(range(12))
    assert {claim.attempt for claim in claims} == {1}
    assert {claim.engine_crashes for claim in claims} == {0}
    begun = [claim for claim in claims if claim.checkpoint is not None]
    assert len(begun) >= 8
    assert all(claim.checkpoint is not None and len(claim.checkpoint.choices[0].token_ids) >= 1 for claim in begun)


def test_a_rolling_restart_loses_no_token_and_computes_none_again(queue: Queue, redis_url: str) -> None:
    bodies = [endless(150, temperature=1.0, seed=number) for number in range(16)]
    with contextlib.ExitStack() as stack:

        def start() -> WorkerProcess:
            return stack.enter_context(running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "0", **SLOW))

        workers = [start(), start()]
        expected = [text_of(result) for result in run_batch(queue, [*bodies])]
        batch = submit_batch(queue, [*bodies], watched=True)
        keys = [RequestKey(batch, line) for line in range(len(bodies))]
        for key in keys:
            wait_published(queue, key, 10)
        for number in (0, 1):
            before = [published(queue, key) for key in keys]
            assert workers[number].stop() == 0
            assert all(published(queue, key) >= tokens for key, tokens in zip(keys, before, strict=True))
            workers[number] = start()
        wait_until(lambda: len(queue.results(batch)) == len(bodies), 120, "the results")
        assert [text_of(result) for _, result in queue.results(batch)] == expected
        assert [published(queue, key) for key in keys] == [150] * len(bodies)
        assert all(worker.stop() == 0 for worker in workers)
    totals = queue.token_totals()
    # A stopping worker has some steps under way, whose tokens no client waits for. A request that
    # began again would compute a thousand tokens twice.
    assert 0 <= totals.generated - totals.delivered <= 16 * len(bodies)


def test_sigterm_lets_short_requests_finish(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "600", **SLOW) as worker:
        batch = submit_batch(queue, [endless(60)], watched=True)
        wait_published(queue, RequestKey(batch, 0), 10)
        assert worker.stop() == 0
    assert len(queue.results(batch)) == 1


def test_sigterm_lets_finish_what_needs_a_few_long_steps_more(queue: Queue, redis_url: str) -> None:
    crawling = poisoned_environment(Poison("three", "crawl"))
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "60", **crawling) as worker:
        batch = submit_batch(queue, [endless(3)], watched=True)
        # The next token comes long after the worker began to look
        wait_published(queue, RequestKey(batch, 0), 1)
        assert worker.stop() == 0
    assert len(queue.results(batch)) == 1


def test_sigterm_hands_back_soon_what_cannot_finish_in_time(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "600", **SLOW) as worker:
        batch = submit_batch(queue, [endless(TOKENS, seed=line) for line in range(2)])
        wait_published(queue, RequestKey(batch, 0), 10)
        core = worker.core_pid
        os.kill(core, signal.SIGSTOP)  # no pace at all, so that nothing can finish
        worker.process.terminate()
        wait_until(lambda: ready_length(queue, batch) == 2, 60, "both to be requeued")
        send_all([core], signal.SIGCONT)
        assert worker.process.wait(60) == 0


def test_a_stopping_worker_starts_no_other_core(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "600", **SLOW) as worker:
        batch = submit_batch(queue, [endless(TOKENS)])
        _, api = submit_live(queue, endless(TOKENS))
        follow(queue, api, until=3)
        core = worker.core_pid
        worker.process.terminate()
        wait_until(lambda: worker.state == "draining", 60, "the worker to drain")
        os.kill(core, signal.SIGKILL)
        assert worker.process.wait(60) == 0
        assert worker.log().count("ready after") == 1
    assert ready_length(queue, batch) == 1


def test_sigterm_while_loading_ends_at_once(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, ready=False) as worker:
        wait_until(lambda: worker.record, 60, "the worker to appear")
        assert worker.stop() == 0
    # Which is shown for a moment
    assert {worker.state for worker in queue.workers()} <= {"stopped"}


def test_sigterm_does_not_wait_for_a_tokenizer_that_cannot_be_read(
    queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    template = tmp_path / "endless"
    os.mkfifo(template)
    with running_worker(queue, redis_url, *FLAGS, "--chat-template", str(template), ready=False) as worker:
        wait_until(lambda: worker.state == "loading", 60, "the worker to appear")
        assert worker.stop() == 0


def test_a_second_sigterm_ends_at_once(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, "--shutdown-timeout", "600", **SLOW) as worker:
        batch = submit_batch(queue, [endless(TOKENS)])
        wait_published(queue, RequestKey(batch, 0), 10)
        core = worker.core_pid
        worker.process.terminate()
        wait_until(lambda: worker.state == "draining", 60, "the worker to drain")
        assert worker.stop() == 128 + signal.SIGTERM
        wait_until(lambda: not is_running(core), 60, "its core to be gone")


def test_a_worker_outlives_redis(tmp_path: Path) -> None:
    with PrivateServer(tmp_path) as server:
        queue = Queue(connect(server.url), QueueSettings(lease_seconds=1.0, redis_retry_seconds=60.0))
        with running_worker(queue, server.url, *FLAGS, **SLOW) as worker:
            batch = submit_batch(queue, [endless(200), question("What is 2 + 3?")])
            wait_published(queue, RequestKey(batch, 0), 20)
            server.stop()
            wait_until(lambda: "Redis is out of reach" in worker.log(), 60, "the worker to notice")
            server.start()
            wait_until(lambda: len(queue.results(batch)) == 2, 60, "both results")
            assert worker.stop() == 0


def test_a_worker_that_loses_its_leases_lets_go(queue: Queue, redis_url: str) -> None:
    with running_worker(queue, redis_url, *FLAGS, **SLOW) as worker:
        batch = submit_batch(queue, [endless(TOKENS)])
        wait_published(queue, RequestKey(batch, 0), 20)
        record = worker.wait_ready()
        # For as long the worker gets no other claim
        thief = Queue(queue.redis, QueueSettings(lease_seconds=60.0))
        thief.reap(record.id)
        (claim,) = thief.claim("thief", 1, 1, models=["demo"])
        wait_until(lambda: "their leases expired" in worker.log(), 60, "the worker to let go")
        assert queue.requeue("thief", [(claim.key, claim.fence)]) == []


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--model", "/proc/self", "--tokenizer", DEMO_MODEL), 2, "has no config.json"),
        (("--redis-url", "unix:///nowhere/redis.sock"), 1, "Redis cannot be used"),
        (("--chat-template", "{% for %}"), 2, "not valid Jinja"),
        (
            ("--chat-template", 25 * "{% for a in messages %}" + 25 * "{% endfor %}"),
            2,
            "too many statically nested blocks",
        ),
        (("--kv-cache-memory-bytes", "999999G"), 2, "do not fit into the"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    redis_url: str, flags: tuple[str, ...], code: int, words: str
) -> None:
    command = [sys.executable, "-m", "pipeline", "worker", "--redis-url", redis_url, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert words in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"rope_parameters": "odd"}, "cannot be loaded: ValueError: "),
        ("tokenizer_config.json", {"added_tokens_decoder": {"odd": {}}}, "cannot be served: ValueError: "),
    ],
)
def test_an_unexpected_error_of_loading_is_one_sentence_and_a_traceback_for_debugging(
    queue: Queue, redis_url: str, tmp_path: Path, name: str, changes: dict[str, object], words: str
) -> None:
    """Clients get the sentence, without the folder."""
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "odd"))
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    for level in ("info", "debug"):
        command = [sys.executable, "-m", "pipeline", "worker", folder, "--redis-url", redis_url, "--log-level", level]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert done.stderr.strip().splitlines()[-1].startswith(f"Error: the model {folder} {words}")
        assert ("Traceback" in done.stderr) == (level == "debug")
    reasons = queue.load_failures()
    assert reasons.keys() == {"odd", str(folder)}
    assert all("ValueError: " in reason and "/" not in reason and "--" not in reason for reason in reasons.values())


def test_a_worker_dies_with_its_parent(queue: Queue, redis_url: str) -> None:
    script = (
        "import functools, os, subprocess, sys, time; from jobs.process import die_with_parent;"
        "p = subprocess.Popen([sys.executable, '-m', 'pipeline', 'worker', '--redis-url', sys.argv[1]],"
        " preexec_fn=functools.partial(die_with_parent, os.getpid()));"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, redis_url], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = WorkerProcess(parent, queue, os.devnull)  # type: ignore[arg-type]
    try:
        worker.pid = int(parent.stdout.readline())
        worker.wait_ready()
        core = worker.core_pid
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(worker.pid) and not is_running(core), 60, "both to be gone")
