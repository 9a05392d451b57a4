"""run-batch with REDIS_URL: the fleet answers, however it was started."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.batch.manifest import load_manifest
from jobs.protocol.requests import Claim
from jobs.protocol.results import Result
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import check_answers, examples, read_results
from tests.support.commands import EXAMPLES, run_pipeline, running_pipeline
from tests.support.control_plane import Answering, chat_line, control_plane, echo, write_input
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """A control plane and a worker, each a command of its own, on a Redis of their own."""
    with (
        running_server() as server,
        running_pipeline("jobs", redis_url=server.url),
        running_pipeline("worker", redis_url=server.url) as worker,
    ):
        worker.wait_for("worker INFO ready")
        wait_for_leader(server.url)
        yield server.url


def wait_for_leader(redis_url: str) -> None:
    """Until the control plane is there, which a run waits for some seconds only."""
    with connect(redis_url) as client:
        wait_until(lambda: client.exists(keys.LEADER), 60, "a ticker that leads")


@pytest.mark.proof
def test_the_fleet_answers_detached_and_attached(fleet: str, tmp_path: Path, run_here: RunHere) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 6), tmp_path / "out.jsonl"
    done = run_here("run-batch", source, "-o", output, REDIS_URL=fleet)
    assert done.code == 0, done.err
    assert "ready after" not in done.err
    check_answers(source, output)

    handed_in = run_here("run-batch", source, "-o", tmp_path / "detached.jsonl", "--detach", REDIS_URL=fleet)
    assert handed_in.code == 0, handed_in.err
    batch_id = handed_in.out.strip()
    assert batch_id.startswith("batch_")
    waited = run_here("wait", batch_id, "-o", tmp_path / "copy.jsonl", REDIS_URL=fleet)
    assert waited.code == 0, waited.err
    check_answers(source, tmp_path / "detached.jsonl")
    assert read_results(tmp_path / "copy.jsonl") == read_results(tmp_path / "detached.jsonl")

    status = run_here("status", REDIS_URL=fleet, COLUMNS="200")
    assert "Ended batches" in status.out
    assert "ready" in status.out
    assert "delivered" in status.out

    refused = run_here("run-batch", source, "-o", tmp_path / "no.jsonl", "--model", "other", REDIS_URL=fleet)
    assert refused.code == 2
    assert "no worker serves other; served are: demo" in refused.err


@pytest.mark.proof
def test_tail_follows_a_batch_to_its_end(fleet: str, tmp_path: Path, run_here: RunHere) -> None:
    """Stop the worker until a client watches, so that all tokens are seen."""
    client = connect(fleet)
    (worker,) = Queue(client).workers()
    row = json.loads(EXAMPLES.read_text().splitlines()[0])
    row["body"] |= {"max_tokens": 300, "ignore_eos": True, "n": 2, "temperature": 1.0}
    source = tmp_path / "long.jsonl"
    source.write_text(json.dumps(row) + "\n")
    os.kill(worker.pid, signal.SIGSTOP)
    batch_id = run_here("run-batch", source, "--detach", REDIS_URL=fleet).out.strip()
    with running_pipeline("tail", batch_id, redis_url=fleet) as tail:
        wait_until(lambda: client.zscore(keys.WATCHED, batch_id) is not None, 60, "someone to watch")
        os.kill(worker.pid, signal.SIGCONT)
        assert tail.wait(120) == 0
        text = tail.output
    assert run_here("wait", batch_id, REDIS_URL=fleet).code == 0
    choices = read_results(tmp_path / "long.results.jsonl")[0]["response"]["body"]["choices"]
    assert [choice["message"]["content"].removesuffix("\n") for choice in choices] == [
        "\n".join(re.findall(rf"(?m)^{batch_id}/\d+{label}: (.*)$", text)) for label in ("", r" \(1\)")
    ]


def test_without_a_worker_nothing_is_begun(redis_url: str, tmp_path: Path, run_here: RunHere) -> None:
    source = examples(tmp_path / "requests.jsonl", 2)
    done = run_here("run-batch", source, REDIS_URL=redis_url)
    assert done.code == 2
    assert "no worker is there to answer" in done.err
    assert "--local-worker" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl"]


@pytest.mark.proof
def test_a_local_worker_joins_the_fleet_for_one_file(redis_url: str, tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 3), tmp_path / "out.jsonl"
    with running_pipeline("jobs", redis_url=redis_url):
        wait_for_leader(redis_url)
        done = run_pipeline(
            "run-batch", source, "-o", output, "--local-worker", "--max-num-seqs", 2, redis_url=redis_url
        )
    assert done.returncode == 0, done.stderr
    check_answers(source, output)
    assert "ready" not in run_pipeline("status", redis_url=redis_url).stdout


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-num-seqs", "4"], "add --local-worker"),
        (["--detach", "--local-worker"], "give one of them"),
    ],
)
def test_flags_that_contradict_a_fleet_are_refused(
    redis_url: str, tmp_path: Path, flags: list[str], reason: str, run_here: RunHere
) -> None:
    done = run_here("run-batch", examples(tmp_path / "requests.jsonl", 1), *flags, REDIS_URL=redis_url)
    assert done.code == 2
    assert reason in done.err


@pytest.mark.proof
def test_the_same_command_comes_back_to_a_batch_though_no_worker_is_left(redis_url: str, tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 4), tmp_path / "out.jsonl"
    with running_pipeline("jobs", redis_url=redis_url):
        with running_pipeline("worker", redis_url=redis_url) as worker:
            worker.wait_for("worker INFO ready")
        wait_for_leader(redis_url)
        assert (
            run_pipeline(
                "run-batch", source, "-o", output, "--detach", "--model", "demo", redis_url=redis_url
            ).returncode
            == 0
        )
        with running_pipeline("run-batch", source, "-o", output, "--model", "demo", redis_url=redis_url) as again:
            again.wait_for("waiting for a worker")
            with running_pipeline("worker", redis_url=redis_url):
                assert again.wait(120) == 0
    check_answers(source, output)


@pytest.mark.proof
def test_a_queue_that_came_back_empty_gets_the_batch_again(fleet: str, tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", 60), tmp_path / "out.jsonl"
    with running_pipeline("run-batch", source, "-o", output, redis_url=fleet) as run:
        run.wait_for("batch batch_")
        connect(fleet).flushall()
        assert run.wait(120) == 0, run.output
    check_answers(source, output)


@pytest.mark.proof
def test_a_fleet_without_a_control_plane_is_named(redis_url: str, tmp_path: Path) -> None:
    with running_pipeline("worker", redis_url=redis_url) as worker:
        worker.wait_for("worker INFO ready")
        done = run_pipeline("run-batch", examples(tmp_path / "requests.jsonl", 1), redis_url=redis_url)
    assert done.returncode == 1
    assert "start `pipeline jobs`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_results_stay_where_a_run_is_refused_late(tmp_path: Path) -> None:
    """Redis came back empty, and the input has changed meanwhile."""
    source, output = write_input(tmp_path / "in.jsonl", 3000), tmp_path / "out.jsonl"
    refused = threading.Event()

    def answer(claim: Claim) -> Result:
        """Some lines wait until the run has been refused, so that it cannot end before."""
        if worker.answered > 1000:
            refused.wait(150)
        return echo(claim)

    with running_server() as server, control_plane(server.url), Answering(server.url, answer, limit=16) as worker:
        wait_for_leader(server.url)
        with connect(server.url) as client:
            wait_until(lambda: Queue(client).workers(), 60, "the worker")
        try:
            with running_pipeline("run-batch", source, "-o", output, redis_url=server.url) as run:
                wait_until(lambda: parts_of(output) or run.process.poll() is not None, 60, "a part")
                with source.open("ab") as writer:
                    writer.write(chat_line("more"))
                with connect(server.url) as client:
                    client.flushall()
                assert run.wait() == 2, run.output
                assert "has changed since" in run.output
        finally:
            refused.set()
    assert parts_of(output)


def parts_of(output: Path) -> list[str]:
    """Files of finished lines that the manifest beside an output lists."""
    manifest = load_manifest(f"{output}.parts")
    return [] if manifest is None else [part.name for part in manifest.parts]
