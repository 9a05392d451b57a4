"""Workers on a Ray cluster come with the requests, move from dead nodes, and go when it is quiet.

Each test ends with all of its lines answered once.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from batch_inference_pipeline import BatchHandle
from jobs.queue.registry import WorkerRecord
from tests.pipeline.ray.conftest import LEASE, START_SECONDS, RayFleet, ray_nodes
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.processes import command_line, descendants, is_running
from tests.support.store_batches import custom_ids
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1200)]

TOTAL = 150
LEASE_MARGIN = 60 * float(LEASE["LEASE_SECONDS"])  # of a machine that is slow and busy


def submitted(fleet: RayFleet) -> BatchHandle:
    return fleet.client.submit([f"Count from {first} to {first + 30}." for first in range(TOTAL)], temperature=0)


def check_all_answered_once(fleet: RayFleet, batch: BatchHandle) -> None:
    ended = batch.wait()
    assert ended.request_counts is not None
    counts = ended.request_counts
    assert (counts.completed, counts.failed, counts.total) == (TOTAL, 0, TOTAL)
    assert fleet.file(ended.error_file_id) == b""
    written = Counter(custom_ids(fleet.file(ended.output_file_id)))
    assert written == Counter({f"request-{number}": 1 for number in range(TOTAL)})


def test_workers_come_with_the_first_line_and_go_when_it_is_quiet(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(2)
    with ray_fleet.running("--max-workers", 2, "--quiet-seconds", 2) as command:
        assert ray_fleet.queue.workers() == []
        batch = submitted(ray_fleet)
        command.wait_for("placing the worker demo/1")
        check_all_answered_once(ray_fleet, batch)
        command.wait_for("the worker demo/0 has stopped")
        command.wait_for("the worker demo/1 has stopped")
        assert "fewer workers are enough" in command.output
        assert ray_fleet.ready() == []


def test_all_workers_that_a_batch_needs_are_asked_for_before_the_first_one_runs(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(4)
    with ray_fleet.running("--min-workers", 0, "--max-workers", 4, "--quiet-seconds", 600) as command:
        assert ray_fleet.queue.workers() == []
        batch = submitted(ray_fleet)
        wait_until(
            lambda: ray_fleet.queue.waiting_work(["demo"])["demo"][1] or "placing" in command.output,
            START_SECONDS,
            "a line to be claimable",
        )
        claimable = time.monotonic()
        command.wait_for("placing the worker demo/3", START_SECONDS)
        asked = time.monotonic() - claimable
        wait_until(lambda: len(ray_fleet.queue.workers()) == 4, START_SECONDS, "4 workers to be registered")
        registered = time.monotonic() - claimable
        print(f"four workers asked for {asked:.1f} s after the first line, registered after {registered:.1f} s")
        check_all_answered_once(ray_fleet, batch)
        for number in range(4):
            command.wait_for(f"the worker demo/{number} runs", START_SECONDS)
        events = re.findall(r"placing the worker demo/\d for \d+ requests|the worker demo/\d runs", command.output)
        assert events[:4] == [f"placing the worker demo/{number} for {TOTAL} requests" for number in range(4)]
        assert sorted(events[4:]) == [f"the worker demo/{number} runs" for number in range(4)]


def test_lines_of_dead_nodes_are_answered_elsewhere(ray_fleet: RayFleet) -> None:
    with ray_fleet.running("--min-workers", 2, "--max-workers", 2):
        for _ in range(2):
            ray_fleet.cluster.have(3)
            ray_fleet.wait_ready(2)
            batch = submitted(ray_fleet)
            check_lines_go_on_without(ray_fleet, ray_fleet.wait_holding())
            check_all_answered_once(ray_fleet, batch)


def check_lines_go_on_without(fleet: RayFleet, worker: WorkerRecord) -> None:
    """Kill its node; another worker claims its lines once their leases end."""
    held = fleet.held_by(worker)
    killed = time.monotonic()
    fleet.cluster.kill_node_of(worker)
    wait_until(lambda: not fleet.stays_with(worker, held), LEASE_MARGIN, "the lines to go on elsewhere")
    print(f"{len(held)} lines of a dead node went on within {time.monotonic() - killed:.1f} s")


def test_kills_of_each_kind_lose_and_repeat_no_line(ray_fleet: RayFleet, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [*KILLS, *rng.choices([*KILLS], k=ROUNDS - len(KILLS))]
    rng.shuffle(kinds)
    batches = []
    with ray_fleet.running("--min-workers", 2, "--max-workers", 2) as command:
        for kind in kinds:
            ray_fleet.cluster.have(3)
            batch, answered = submitted(ray_fleet), rng.randrange(1, TOTAL // 2)
            batches.append(batch)
            wait_until(
                lambda batch=batch, answered=answered: ray_fleet.queue.batch_fields(batch.id).finished >= answered,
                START_SECONDS,
                f"{answered} lines to be answered",
            )
            worker = busiest_worker(ray_fleet)
            print(f"{kind} killed after {answered} lines, while a worker holds {len(ray_fleet.held_by(worker))}")
            KILLS[kind](ray_fleet, command, worker)
        for batch in batches:
            check_all_answered_once(ray_fleet, batch)


def busiest_worker(fleet: RayFleet) -> WorkerRecord:
    """Of those whose process is there; one that was killed is registered for a while."""
    found = wait_until(
        lambda: [worker for worker in fleet.ready() if is_running(worker.pid)], START_SECONDS, "a worker to be ready"
    )
    return max(found, key=lambda worker: len(fleet.held_by(worker)))


def kill_node(fleet: RayFleet, _: RunningCommand, worker: WorkerRecord) -> None:
    fleet.cluster.kill_node_of(worker)
    wait_until(lambda: not is_running(worker.pid), START_SECONDS, "the worker to end with its node")


def kill_worker(_: RayFleet, __: RunningCommand, worker: WorkerRecord) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(worker.pid), START_SECONDS, "the worker to end")


def kill_placement(_: RayFleet, command: RunningCommand, __: WorkerRecord) -> None:
    """The supervisor of `pipeline fleet` starts the next one."""

    def placement() -> list[int]:
        return [one for one in descendants(command.process.pid) if "pipeline.ray.placement" in command_line(one)]

    process = wait_until(placement, START_SECONDS, "the process that places workers")[0]  # before what it forks
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not is_running(process), START_SECONDS, "its end")


def kill_redis(fleet: RayFleet, _: RunningCommand, __: WorkerRecord) -> None:
    fleet.kill_redis()


ROUNDS = 8
KILLS: dict[str, Callable[[RayFleet, RunningCommand, WorkerRecord], None]] = {
    "node": kill_node,
    "worker": kill_worker,
    "placing process": kill_placement,
    "Redis": kill_redis,
}


def test_workers_come_to_the_node_that_has_what_they_need(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(2)
    ray_fleet.cluster.add(resources={"fast_disk": 1.0})
    try:
        needs = ("--worker-cpus", 0.5, "--worker-resource", "fast_disk=0.5")
        with ray_fleet.running("--min-workers", 2, "--max-workers", 2, *needs):
            workers = ray_fleet.wait_ready(2)
            assert {worker.pid for worker in workers} <= set(ray_fleet.cluster.processes_of_last_node())
            check_all_answered_once(ray_fleet, submitted(ray_fleet))
    finally:
        ray_fleet.cluster.kill_node()


def test_a_worker_waits_for_a_node_that_has_what_it_needs(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(1)
    with ray_fleet.running("--min-workers", 1, "--worker-resource", "fast_disk=1") as command:
        command.wait_for("placing the worker demo/0")
        batch = submitted(ray_fleet)
        ray_fleet.cluster.add(resources={"fast_disk": 1.0})
        try:
            (worker,) = ray_fleet.wait_ready(1)
            assert worker.pid in ray_fleet.cluster.processes_of_last_node()
            check_all_answered_once(ray_fleet, batch)
        finally:
            ray_fleet.cluster.kill_node()


def test_a_killed_fleet_leaves_its_workers_to_the_next_one(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(2)
    flags = ("--min-workers", 2, "--max-workers", 2)
    with ray_fleet.running(*flags) as command:
        before = ray_fleet.wait_ready(2)
        batch = submitted(ray_fleet)
        command.process.kill()
        command.wait()
    with ray_fleet.running(*flags) as command:
        command.wait_for("adopting the running worker demo/0")
        command.wait_for("adopting the running worker demo/1")
        check_all_answered_once(ray_fleet, batch)
        assert {worker.id for worker in ray_fleet.ready()} == {worker.id for worker in before}
        assert "placing" not in command.output
        command.process.kill()
        command.wait()
    with ray_fleet.running(*flags, "--max-num-batched-tokens", 512) as command:
        command.wait_for("stopping the worker demo/0: its flags have changed")
        wait_until(
            lambda: not {worker.id for worker in ray_fleet.ready()} & {worker.id for worker in before},
            START_SECONDS,
            "workers with other flags",
        )
        check_all_answered_once(ray_fleet, submitted(ray_fleet))
        ray_fleet.wait_ready(2)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0
        assert ray_fleet.ready() == []


def test_an_interrupted_drain_goes_on_and_settings_of_a_node_do_not_count(ray_fleet: RayFleet) -> None:
    ray_fleet.cluster.have(0)
    ray_fleet.cluster.add(PIPELINE_MAX_NUM_SEQS="nonsense", LEASE_SECONDS="nonsense")
    try:
        with ray_fleet.running("--min-workers", 1) as command:
            (worker,) = ray_fleet.wait_ready(1)
            batch = submitted(ray_fleet)
            os.kill(worker.pid, signal.SIGSTOP)  # so that the drain lasts
            command.process.send_signal(signal.SIGTERM)
            command.wait_for("the fleet stops")
            wait_until(lambda: has_term_pending(worker.pid), 120, "the worker to be asked to stop")
            command.process.send_signal(signal.SIGTERM)
            assert command.wait() == 1
            assert "the command ended before its workers had stopped" in command.output
            os.kill(worker.pid, signal.SIGCONT)
        with ray_fleet.running():  # there is room for one worker only
            check_all_answered_once(ray_fleet, batch)
            assert worker.id not in {one.id for one in ray_fleet.ready()}
    finally:
        ray_fleet.cluster.kill_node()


def has_term_pending(process_id: int) -> bool:
    """Return whether a stopped process was sent SIGTERM."""
    found = re.search(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{process_id}/status").read_text(), re.MULTILINE)
    assert found is not None
    return bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_an_older_image_on_one_node_is_named_and_the_others_work(ray_fleet: RayFleet, tmp_path: Path) -> None:
    older = tmp_path / "older" / "pipeline"
    older.mkdir(parents=True)
    # Else an editable installation would find the modules that this package lacks
    (older / "__init__.py").write_text(
        "import sys\nsys.meta_path = [one for one in sys.meta_path if 'Editable' not in repr(one)]\n"
    )
    ray_fleet.cluster.have(1)
    ray_fleet.cluster.add(PYTHONPATH=str(older.parent))
    try:
        with ray_fleet.running("--max-workers", 2) as command:
            batch = submitted(ray_fleet)
            command.wait_for("No module named 'pipeline.ray'")
            check_all_answered_once(ray_fleet, batch)
    finally:
        ray_fleet.cluster.kill_node()


def test_a_lost_head_is_named_and_lines_go_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_nodes())
        cluster.have(1)
        fleet = RayFleet(stack, tmp_path, cluster)
        with fleet.running("--max-workers", 1) as command:
            batch = submitted(fleet)
            fleet.wait_holding()
            cluster.kill_head()
            command.wait_for("does not answer")
            command.wait_for("restarting it")
            # The node ends with its head, before all lines are done or after
            stack.enter_context(running_pipeline("worker", "--dtype", "float32", redis_url=fleet.redis_url, **LEASE))
            check_all_answered_once(fleet, batch)
            command.process.send_signal(signal.SIGTERM)
            assert command.wait() == 1
