"""Workers and engine cores killed at random moments: every line ends exactly once, with the answer
it has undisturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from functools import partial
from typing import Any

import pytest

from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from tests.workers.test_worker import answer, question, run_batch, submit_batch

FLAGS = ("--lease-seconds", "1", "--stream-interval", "0.05", "--max-num-seqs", "16")
KILLS = 8


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("copies", [1, 5], ids=["each once", "five copies"])
def test_every_line_ends_once_and_right_whatever_is_killed(redis_client: object, redis_url: str, copies: int) -> None:
    # The cap on lost workers is there for requests that kill; here everything is killed far more
    # often than anywhere else.
    queue = Queue(connect(redis_url), QueueSettings(lease_seconds=1.0, worker_deaths=1000))
    seed = int(os.environ.get("KILL_SEED", 1))
    print(f"seed {seed} (set KILL_SEED to draw others)")
    chance = random.Random(seed)
    bodies = [body(n) for n in range(60)] * copies
    with running_worker(queue, redis_url, *FLAGS):
        expected = [texts(result) for result in run_batch(queue, [*bodies])]
    done = threading.Event()
    ticker = threading.Thread(target=tick, args=(queue, done))
    ticker.start()
    try:
        batch = submit_batch(queue, [*bodies])
        with contextlib.ExitStack() as workers:
            pair = [workers.enter_context(running_worker(queue, redis_url, *FLAGS)) for _ in range(2)]
            for _ in range(KILLS):
                before = completed(queue, batch)
                if before == len(bodies):
                    break
                wait_until(partial(has_moved, queue, batch, before), 120, "progress")
                number = chance.randrange(2)
                if chance.random() < 0.5:
                    kill_core(pair[number])
                else:
                    pair[number].kill()
                    pair[number] = workers.enter_context(running_worker(queue, redis_url, *FLAGS, ready=False))
            wait_until(partial(has_moved, queue, batch, len(bodies) - 1), 180, "all results")
        assert [line for line, _ in queue.results(batch)] == list(range(len(bodies)))
        assert [texts(result) for _, result in queue.results(batch)] == expected
        record = queue.batch_fields(batch)
        assert (record.completed, record.failed) == (len(bodies), 0)
    finally:
        done.set()
        ticker.join()


def body(n: int) -> dict[str, Any]:
    """One to three choices, every fifth time the best ones, some with log probabilities; about as
    many tokens each.
    """
    choices = 1 + n % 3
    asked = {"n": choices, "best_of": choices + (n % 5 == 0), "logprobs": n % 4 == 0}
    return question(
        f"What is {n} + {n + 7}?",
        max_tokens=(100 + 7 * n) // choices,
        ignore_eos=True,
        temperature=n % 2,
        seed=n,
        **asked,
    )


def texts(result: Result) -> list[str]:
    assert result.status == 200, result.body
    return [choice["message"]["content"] for choice in answer(result)["choices"]]


def completed(queue: Queue, batch: str) -> int:
    return queue.batch_fields(batch).completed


def has_moved(queue: Queue, batch: str, before: int) -> bool:
    return completed(queue, batch) > before


def tick(queue: Queue, done: threading.Event) -> None:
    """What the control plane's ticker does for leases."""
    while not done.wait(0.5):
        queue.reap()


def kill_core(worker: WorkerProcess) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends by itself just now
        os.kill(worker.core_pid, signal.SIGKILL)
