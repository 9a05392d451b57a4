"""Running the control plane's jobs step by step in the test's own process."""

from pathlib import Path
from typing import Any

import redis

from jobs.batch.client import BatchRecord, BatchSpec, create_batch, get_batch
from jobs.control.runner import Runner
from jobs.control.ticker import Ticker
from jobs.protocol.requests import Finished
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.control_plane import Answer, echo
from tests.support.waiting import wait_until


def begin(client: redis.Redis, source: Path, **options: Any) -> BatchRecord:
    """A batch beside its input; models default to `m`, failures to inline ones."""
    options = {"models": ("m",), "error_file": "inline", "output": str(source.with_name("out.jsonl"))} | options
    retry_failed = options.pop("retry_failed", False)
    return create_batch(
        client,
        BatchSpec(input=str(source), root=str(source.with_name("out.parts")), **options),
        retry_failed=retry_failed,
    )


def list_batches(client: redis.Redis) -> list[BatchRecord]:
    """All batches that have a record."""
    return [get_batch(client, batch) for batch in Queue(client).batches()]


def wait_for_batch(client: redis.Redis, batch: str, timeout: float) -> BatchRecord:
    """Returns the record once other processes have brought the batch to its end."""

    def ended() -> BatchRecord | None:
        record = get_batch(client, batch)
        return record if record.ended else None

    return wait_until(ended, timeout, f"the end of {batch}")


def step(client: redis.Redis, batch: str, queue: Queue | None = None) -> BatchRecord:
    """Runs the job that the state asks for, once, on `queue` or the client's."""
    Runner(queue or Queue(client)).run(batch)
    return get_batch(client, batch)


def tick(leader: Ticker) -> None:
    """Let the ticker do all that it does in a second."""
    leader.tick()
    leader.upkeep.run_once()


def answer_all(
    client: redis.Redis, answer: Answer = echo, models: tuple[str, ...] = ("m",), most: int = 1 << 30
) -> int:
    """Claims and commits what waits, like a worker; returns how many."""
    queue = Queue(client)
    queue.register_worker(WorkerRecord("w", list(models), "ready", 4096, 1.0, "test", 1))
    total = 0
    seq = int(client.hget("{q}:claim:w", "seq") or 0)  # type: ignore[arg-type]
    while total < most:
        seq += 1
        claims = queue.claim("w", seq, min(100, most - total), models=list(models))
        if not claims:
            break
        assert queue.commit("w", [Finished(claim.key, claim.fence, answer(claim)) for claim in claims]) == []
        total += len(claims)
    return total


def run_to_end(
    client: redis.Redis, batch: str, answer: Answer = echo, models: tuple[str, ...] = ("m",), steps: int = 50
) -> BatchRecord:
    """Steps and answers until the state is final."""
    for _ in range(steps):
        record = step(client, batch)
        assert record.problem is None, record.problem
        if record.ended:
            return record
        answer_all(client, answer, models)
    raise AssertionError(f"not at an end after {steps} steps: {record}")
