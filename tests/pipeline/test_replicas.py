"""Several replicas under one command, and several ranks under one replica: they share the work, and
the death of one loses none of it.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.pipeline.results import check_answers, examples
from tests.support.commands import RunningCommand, run_pipeline, running_pipeline
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import command_line, descendants, is_running, send_all
from tests.support.waiting import wait_until
from tests.workers.test_worker import endless, submit_batch, text_of

START_SECONDS = 100
AT_WORK = Poison("", "hold", start=40)  # on all but the worker's own first request


def queue_of(run: RunningCommand) -> Queue:
    """That of a `run-batch` which has said where it is."""
    found = re.search(r"REDIS_URL=(\S+)", run.wait_for("pipeline tail"))
    assert found is not None
    return Queue(connect(found[1]))


def at_work(queue: Queue) -> list[int]:
    """Process ids of the workers that hold requests."""
    return [worker.pid for worker in queue.workers() if queue.redis.exists(keys.held(worker.id))]


def both_at_work(queue: Queue) -> list[int]:
    """Those of two workers once both hold requests."""
    found: list[int] = []

    def look() -> bool:
        found[:] = at_work(queue)
        return len(found) == 2

    wait_until(look, START_SECONDS, "both replicas at work")
    return found


def ready(queue: Queue) -> set[int]:
    """Process ids of the workers that take requests."""
    return {worker.pid for worker in queue.workers() if worker.state == "ready"}


@pytest.mark.proof
def test_two_replicas_share_a_batch_and_one_is_killed_in_the_middle(redis_url: str, queue: Queue) -> None:
    """The number comes from the environment, which the replicas inherit too; of the threads there
    each has its share.
    """
    flags = ("--max-num-seqs", 4, "--dtype", "float32", "--stream-interval", 0.1)
    with running_pipeline(
        "worker", *flags, redis_url=redis_url, PIPELINE_DATA_PARALLEL_SIZE="2", OMP_NUM_THREADS="2"
    ) as run:
        wait_until(lambda: len(ready(queue)) == 2, START_SECONDS, "both replicas to be ready")
        cores = [pid for pid in descendants(run.process.pid) if "core_process" in command_line(pid)]
        send_all(cores, signal.SIGSTOP)  # so that nothing ends before both have something
        batch = submit_batch(queue, [endless(150, seed=line) for line in range(16)])
        killed, _ = both_at_work(queue)
        os.kill(killed, signal.SIGKILL)
        send_all(cores, signal.SIGCONT)
        wait_until(lambda: len(queue.results(batch)) == 16, START_SECONDS, "the results")
        assert len({text_of(result) for _, result in queue.results(batch)}) == 1
        wait_until(lambda: len(ready(queue) - {killed}) == 2, START_SECONDS, "both replicas again")
        children = descendants(run.process.pid)
        assert all("OMP_NUM_THREADS=1" in Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children)
        run.process.terminate()
        assert run.wait(120) == 0, run.output
        wait_until(lambda: not any(map(is_running, children)), 60, "all children to end")
        assert re.search(r"the worker-[01] process was killed by SIGKILL; restarting it", run.output)
        assert len(re.findall(r"^worker-[01]: .* stopped; requeued 0 requests", run.output, re.MULTILINE)) == 2


@pytest.mark.proof
def test_a_whole_run_survives_the_death_of_a_replica(tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 300), tmp_path / "out.jsonl"
    flags = ("--data-parallel-size", 2, "--max-num-seqs", 4, "--dtype", "float32")
    (hold := tmp_path / "hold").touch()
    with running_pipeline(
        "run-batch", source, "-o", output, "--log-level", "debug", *flags, **poisoned_environment(AT_WORK, hold=hold)
    ) as run:
        queue = queue_of(run)
        os.kill(both_at_work(queue)[0], signal.SIGKILL)
        hold.unlink()
        queue.redis.close()
        assert run.wait(250) == 0, run.output
    check_answers(source, output)


@pytest.mark.proof
def test_the_requests_of_a_rank_that_died_are_answered_by_the_next_core(tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 40), tmp_path / "out.jsonl"
    flags = ("--tensor-parallel-size", 3, "--max-num-seqs", 4, "--dtype", "float32")
    (hold := tmp_path / "hold").touch()
    with running_pipeline(
        "run-batch", source, "-o", output, "--log-level", "debug", *flags, **poisoned_environment(AT_WORK, hold=hold)
    ) as run:
        queue = queue_of(run)
        wait_until(lambda: at_work(queue), START_SECONDS, "the replica at work")
        os.kill(
            next(pid for pid in descendants(run.process.pid) if "rank_process" in command_line(pid)), signal.SIGKILL
        )
        hold.unlink()
        queue.redis.close()
        assert run.wait(120) == 0, run.output
        assert re.search(
            r"the engine core was ended by SIGKILL; its last output: .*rank 1 \(process \d+\) was ended by SIGKILL",
            run.output,
        )
    check_answers(source, output)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--device", "cuda:1", "--data-parallel-size", 2),
            "--device cuda:1 names one GPU, and --data-parallel-size 2 needs more",
        ),
        pytest.param(
            ("--tensor-parallel-size", 2),
            "2 ranks cannot share the model's 6 attention heads and 3 key-value heads equally",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_sentence(
    tmp_path: Path, flags: tuple[object, ...], sentence: str
) -> None:
    refused = run_pipeline("run-batch", examples(tmp_path / "requests.jsonl", 2), *flags)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"Error: {sentence}")
