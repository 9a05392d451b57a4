"""Answers with everything on are the same through preemption and through the death of a worker,
choice by choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.protocol.requests import RequestKey, StreamEntry
from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from tests.workers.test_worker import COMPLETIONS, answer, follow, run_batch, submit_live

FLAGS = ("--lease-seconds", "1", "--stream-interval", "0.05", "--max-num-seqs", "8")
TOKENS = 150
# Some tokens before the end of `SEEDED`, by the length of its prompt
MIDWAY = Poison("three", "hold", start=TOKENS)
SEEDED: dict[str, Any] = {
    "model": "demo",
    "prompt": "Repeat this list in order: one two three",
    "max_tokens": TOKENS,
    "temperature": 1.0,
    "seed": 77,
    "ignore_eos": True,
    "min_tokens": 3,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.05,
    "min_p": 0.01,
    "logit_bias": {"40": 1.5},
    "bad_words": ["unheard"],
}


@pytest.fixture
def queue(redis_client: object, redis_url: str) -> Queue:
    return Queue(connect(redis_url), QueueSettings(lease_seconds=1.0))


def choices(result: Result | None) -> list[dict[str, Any]]:
    """Without the log probabilities, which are close but not equal where a prompt was computed in
    other pieces.
    """
    assert result is not None
    assert result.status == 200, result.body
    return [{**choice, "logprobs": None} for choice in answer(result)["choices"]]


def numbers(result: Result | None, choice: int) -> list[float]:
    assert result is not None
    found: list[float] = answer(result)["choices"][choice]["logprobs"]["token_logprobs"]
    return found


def of_choice(entries: list[StreamEntry], choice: int) -> tuple[list[int], str]:
    """The tokens and the text of one choice, once all its chunks follow each other without gap or
    repetition.
    """
    token_ids: list[int] = []
    text = ""
    for chunk in (chunk for entry in entries for chunk in entry.chunks if chunk.choice == choice):
        assert (chunk.index, chunk.text_offset) == (len(token_ids), len(text))
        token_ids, text = token_ids + chunk.token_ids, text + chunk.text
    return token_ids, text


@pytest.mark.proof
def test_every_choice_goes_on_over_the_death_of_its_worker(queue: Queue, redis_url: str, tmp_path: Path) -> None:
    """One choice has ended when the worker dies; what it had is not generated again."""
    body = {**SEEDED, "n": 3, "logprobs": 2, "echo": True, "stream": True}
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(MIDWAY, hold=tmp_path / "hold")) as worker:
        _, api = submit_live(queue, body, COMPLETIONS)
        entries = follow(queue, api)
        first, *others = (of_choice(entries, choice)[0] for choice in range(3))
        stop = next(token for token in first if not any(token in other for other in others))
        body["stop_token_ids"] = [stop]
        _, api = submit_live(queue, body, COMPLETIONS)
        undisturbed = follow(queue, api)
        with held(tmp_path / "hold"):
            api = killed_midway(queue, worker, body, {0: first.index(stop) + 1, 1: 20})
    with running_worker(queue, redis_url, *FLAGS):
        entries = follow(queue, api)
    result, expected = entries[-1].result, undisturbed[-1].result
    assert choices(result) == choices(expected)
    assert choices(result)[0]["stop_reason"] == stop
    assert result is not None
    assert expected is not None
    assert result.usage.completion_tokens == expected.usage.completion_tokens == first.index(stop) + 1 + 2 * TOKENS
    for choice in range(3):
        assert of_choice(entries, choice) == of_choice(undisturbed, choice)
        assert of_choice(entries, choice)[1] == choices(result)[choice]["text"]
        assert numbers(result, choice) == pytest.approx(numbers(expected, choice), abs=1e-3, nan_ok=True)


def killed_midway(queue: Queue, worker: WorkerProcess, body: dict[str, Any], least: dict[int, int]) -> str:
    """The API process of a call that is held, and whose worker was killed when its choices had
    `least` tokens published.
    """
    key, api = submit_live(queue, body, COMPLETIONS)
    wait_until(lambda: has_published(queue, key, least), 60, "a beginning")
    worker_id = worker.wait_ready().id
    worker.kill()
    queue.reap(worker_id)
    assert queue.read_tokens({key: FIRST_ID})[-1].result is None
    return api


def has_published(queue: Queue, key: RequestKey, least: dict[int, int]) -> bool:
    entries = queue.read_tokens({key: FIRST_ID})
    return all(len(of_choice(entries, choice)[0]) >= count for choice, count in least.items())


@pytest.mark.proof
def test_the_best_are_found_over_the_death_of_a_worker(queue: Queue, redis_url: str, tmp_path: Path) -> None:
    body = {**SEEDED, "n": 2, "best_of": 4}
    with running_worker(queue, redis_url, *FLAGS, **poisoned_environment(MIDWAY, hold=tmp_path / "hold")) as worker:
        (expected,) = run_batch(queue, [body], COMPLETIONS)
        with held(tmp_path / "hold"):
            api = killed_midway(queue, worker, body, dict.fromkeys(range(4), 20))
    with running_worker(queue, redis_url, *FLAGS):
        result = follow(queue, api)[-1].result
    assert choices(result) == choices(expected)


@pytest.mark.proof
def test_seeds_give_the_same_beside_any_others_and_through_preemption(queue: Queue, redis_url: str) -> None:
    """Twelve sequences that all fit into the cache at their beginning, and four at their end."""
    bodies: list[dict[str, Any] | bytes] = [
        {**SEEDED, "n": 2, "seed": seed, "max_tokens": 100, "logprobs": 1} for seed in range(6)
    ]
    small = ("--max-num-seqs", "12", "--kv-cache-memory-bytes", "2000000")
    with running_worker(queue, redis_url, *FLAGS[:-2], *small):
        alone = [run_batch(queue, [body], COMPLETIONS)[0] for body in bodies]
        together = run_batch(queue, bodies, COMPLETIONS)
    for one, other in zip(alone, together, strict=True):
        assert choices(one) == choices(other)
        for choice in range(2):
            assert numbers(one, choice) == pytest.approx(numbers(other, choice), abs=1e-3)
