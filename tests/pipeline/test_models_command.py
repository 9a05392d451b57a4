"""`pipeline models`: what a fleet knows is shown, and forgotten where nothing needs it."""

from pathlib import Path

import pytest
import redis

from jobs.batch.client import cancel_batch
from jobs.protocol.endpoints import ENDPOINTS
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.pipeline.conftest import RunHere
from tests.support.batch_steps import begin, run_to_end, step
from tests.support.control_plane import chat_line, write_input


@pytest.fixture
def known(queue: Queue) -> list[str]:
    """Models of which no worker is left."""
    queue.register_worker(WorkerRecord("w", ["m", "typo"], "ready", 4096, 1.0, "host", 1))
    queue.remove_worker("w")
    return ["m", "typo"]


def names(queue: Queue) -> list[str]:
    return [model.name for model in queue.models()]


def test_a_forgotten_model_is_refused_until_it_is_served_again(
    run_here: RunHere, queue: Queue, redis_client: redis.Redis, redis_url: str, known: list[str], tmp_path: Path
) -> None:
    listed = run_here("models", "list", REDIS_URL=redis_url).out
    assert all(name in listed for name in (*known, next(iter(ENDPOINTS))))
    done = run_here("models", "forget", "typo", REDIS_URL=redis_url)
    assert (done.code, done.err) == (0, "typo is forgotten\n")
    assert names(queue) == ["m"]
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a", model="typo"))
    batch = begin(redis_client, source, models=None).id
    assert {error.code for error in step(redis_client, batch).errors} == {"model_not_found"}
    queue.register_worker(WorkerRecord("w2", ["typo"], "ready", 4096, 1.0, "host", 1))
    assert names(queue) == ["m", "typo"]


def test_one_that_is_needed_is_not_forgotten(
    run_here: RunHere, queue: Queue, redis_client: redis.Redis, redis_url: str, known: list[str], tmp_path: Path
) -> None:
    queue.register_worker(WorkerRecord("w2", ["typo"], "ready", 4096, 1.0, "host", 1))
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 2)).id
    step(redis_client, batch)
    for name, reason in {
        "typo": "a worker serves typo: stop it first",
        "m": f"{batch} has lines for m: wait for its end, or cancel it first",
        "other": "no model other is known in this Redis: `pipeline models list` shows the known models",
    }.items():
        refused = run_here("models", "forget", name, REDIS_URL=redis_url)
        assert (refused.code, refused.err) == (2, f"Error: {reason}\n")
    assert names(queue) == known
    cancel_batch(redis_client, batch)
    run_to_end(redis_client, batch)
    assert run_here("models", "forget", "m", REDIS_URL=redis_url).code == 0
