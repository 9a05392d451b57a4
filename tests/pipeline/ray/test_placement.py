"""Processes that place the workers of one queue: one leads, and takes over what others left."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import ray

from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.version import version
from pipeline.ray.placement import Placement
from pipeline.ray.spec import FleetSpec, ModelSpec, WorkerSpec
from tests.pipeline.ray.conftest import START_SECONDS, RayNodes
from tests.support.redis_server import running_server
from tests.support.requests import request
from tests.support.waiting import wait_until
from workers.engine.messages.config import CPU_SEQUENCES

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


class Contenders:
    """A driver of the cluster, a queue of its own, and any number of placements."""

    def __init__(self, redis_url: str, queue: Queue, address: str, namespace: str) -> None:
        self.queue = queue
        self.stopped: set[str] = set()  # workers that said that they stopped in order, which Redis soon forgets
        self._url, self._address, self._namespace = redis_url, address, namespace

    def placement(self, lowest: int, highest: int, **worker: object) -> Placement:
        settings = {"arguments": ["--device", "cpu", "--dtype", "float32"], "shutdown_timeout": 5.0, **worker}
        spec = WorkerSpec(
            environment={"REDIS_URL": self._url},
            version=version(),
            log_level="info",
            cpus=1.0,
            gpus=0,
            ranks=1,
            resources={},
            **settings,  # type: ignore[arg-type]
        )
        model = ModelSpec("demo", ["demo"], spec, lowest, highest, None, 0.0)
        return Placement(FleetSpec(self._address, self._namespace, self._url, "info", [model]), self.queue)

    def actors(self) -> list[str]:
        return sorted(ray.util.list_named_actors())

    def step_until(self, placement: Placement, condition: Callable[[], object], what: str) -> None:
        """Let it work until the condition holds."""

        def step_and_look() -> object:
            placement.step(time.monotonic())
            return condition()

        self.wait_until(step_and_look, what)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition, and note which workers stop meanwhile."""

        def look() -> object:
            self.stopped |= {worker.id for worker in self.queue.workers() if worker.state == "stopped"}
            return condition()

        wait_until(look, START_SECONDS, what)
        look()

    def step_until_ready(self, placement: Placement, count: int) -> None:
        self.step_until(placement, lambda: len(self.ready()) == count, f"{count} workers to be ready")

    def ready(self) -> list[str]:
        """The workers that take requests."""
        return [worker.id for worker in self.queue.workers() if worker.state == "ready"]

    def end_lead(self) -> None:
        """As when the leader was killed long ago."""
        self.queue.redis.delete(keys.FLEET_LEADER)

    def drain(self, worker: str) -> None:
        """Drain a worker."""
        with suppress(ray.exceptions.ActorDiedError):  # the actor may end before its answer is sent
            ray.get(ray.get_actor(worker).drain.remote())


@pytest.fixture
def contenders(
    cluster: RayNodes, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[Contenders]:
    caplog.set_level("INFO", "pipeline")
    cluster.have(2)
    namespace = request.node.name
    with running_server() as server, connect(server.url) as client:
        ray.init(cluster.address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        try:
            yield Contenders(server.url, Queue(client), cluster.address, namespace)
        finally:
            for name in ray.util.list_named_actors():
                ray.kill(ray.get_actor(name))
            ray.shutdown()


LINES = 4 * CPU_SEQUENCES  # for four workers


def make_line_claimable(queue: Queue) -> None:
    """The first of a batch."""
    queue.create_batch("batch_a", LINES, state="in_progress", fields={"line_models": ["demo"]})
    assert queue.ingest("batch_a", [(0, request("demo"))], 0, 1)


def make_early_line_claimable(queue: Queue) -> None:
    """The first of a file that is validated."""
    queue.create_batch("batch_a", 0)
    assert queue.ingest_early("batch_a", [(0, request("demo"))], "stamp")
    queue.redis.hset(keys.batch("batch_a"), "input_bytes", LINES * queue.window_bytes("batch_a"))


@pytest.mark.parametrize("make_claimable", [make_line_claimable, make_early_line_claimable])
def test_the_first_look_at_a_batch_places_all_workers_that_it_needs(
    contenders: Contenders, make_claimable: Callable[[Queue], None]
) -> None:
    placement = contenders.placement(0, 4)
    placement.step(time.monotonic())
    assert contenders.actors() == []
    make_claimable(contenders.queue)
    contenders.queue.redis.sadd(keys.ACTIVE, "batch_a")
    placement.step(time.monotonic())
    assert contenders.actors() == [f"demo/{number}" for number in range(4)]


def test_one_places_and_the_other_takes_over(contenders: Contenders) -> None:
    first, second = contenders.placement(1, 1), contenders.placement(2, 2)
    contenders.step_until_ready(first, 1)
    second.step(time.monotonic())
    assert contenders.actors() == ["demo/0"]
    before = contenders.queue.workers()
    contenders.end_lead()
    contenders.step_until_ready(second, 2)
    first.step(time.monotonic())
    assert contenders.actors() == ["demo/0", "demo/1"]
    assert before[0].id in {worker.id for worker in contenders.queue.workers()}


def test_workers_above_the_most_are_drained_and_none_is_placed_instead(
    contenders: Contenders, caplog: pytest.LogCaptureFixture
) -> None:
    contenders.step_until_ready(contenders.placement(2, 2), 2)
    before = contenders.ready()
    contenders.end_lead()
    caplog.clear()
    placement = contenders.placement(1, 1)
    contenders.step_until(placement, lambda: contenders.actors() == ["demo/0"], "the second worker to end")
    assert "placing the worker" not in caplog.text
    assert "stopping the worker demo/1" in caplog.text
    assert sorted([*contenders.ready(), *contenders.stopped]) == sorted(before)
    assert len(contenders.stopped) == 1


def test_an_adopted_worker_is_asked_before_it_is_stopped(
    contenders: Contenders, caplog: pytest.LogCaptureFixture
) -> None:
    contenders.step_until_ready(contenders.placement(1, 1), 1)
    contenders.end_lead()
    caplog.clear()
    contenders.step_until(contenders.placement(0, 1), lambda: not contenders.actors(), "the worker to end")
    assert caplog.text.index("demo/0 runs on node") < caplog.text.index("stopping the worker demo/0")
    assert (contenders.ready(), len(contenders.stopped)) == ([], 1)


def test_a_drained_worker_ends_with_its_actor_whoever_watches(contenders: Contenders) -> None:
    contenders.step_until_ready(contenders.placement(1, 1), 1)
    contenders.drain("demo/0")
    contenders.wait_until(lambda: not contenders.actors(), "the actor to end by itself")
    assert (contenders.ready(), len(contenders.stopped)) == ([], 1)


def test_an_adopted_worker_that_drains_is_no_capacity(contenders: Contenders, caplog: pytest.LogCaptureFixture) -> None:
    contenders.step_until_ready(contenders.placement(1, 2), 1)
    contenders.end_lead()
    caplog.clear()
    contenders.drain("demo/0")
    placement = contenders.placement(1, 2)
    contenders.step_until(placement, lambda: "placing the worker" in caplog.text, "another one to be placed")
    contenders.step_until_ready(placement, 1)


def test_only_flags_and_version_tell_workers_apart(contenders: Contenders, caplog: pytest.LogCaptureFixture) -> None:
    contenders.step_until_ready(contenders.placement(1, 1), 1)
    before = contenders.ready()
    contenders.end_lead()
    same = contenders.placement(1, 1, shutdown_timeout=1.0)
    contenders.step_until(same, lambda: caplog.text.count("runs on node") == 2, "the worker to be taken over")
    assert "stopping the worker" not in caplog.text
    contenders.end_lead()
    others = contenders.placement(1, 1, arguments=["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "2"])
    contenders.step_until(others, lambda: "its flags have changed" in caplog.text, "the worker to be replaced")
    contenders.step_until(others, lambda: contenders.stopped and contenders.ready(), "another worker")
    assert contenders.stopped == set(before)
