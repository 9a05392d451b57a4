"""A Ray cluster of several nodes on this machine, and the rest of a fleet without its workers."""

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_inference_pipeline import Pipeline
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.processes import descendants
from tests.support.redis_server import keep_all_that_is_said, kill_and_start, running_server
from tests.support.store_batches import content_of
from tests.support.waiting import wait_until

_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
START_SECONDS = 180.0
LEASE = {"LEASE_SECONDS": "2", "STREAM_INTERVAL": "0.2"}


class RayNodes:
    """A head without room for workers, and nodes with room for one each."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._options: dict[str, Any] = {"object_store_memory": 80 << 20}
        head = {**self._options, "num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    def have(self, count: int) -> None:
        """Add nodes, or kill some, until there are so many."""
        while len(self.nodes) < count:
            self.add()
        while len(self.nodes) > count:
            self.kill_node()

    def add(self, resources: Mapping[str, float] | None = None, **environment: str) -> None:
        options = {**self._options, "resources": dict(resources or {}), "env_vars": environment}
        with chdir(self._folder):  # else this repository would be on the path of its workers
            self.nodes.append(self._cluster.add_node(num_cpus=1, **options))

    def processes_of_last_node(self) -> list[int]:
        """Those of the node that was added last, its workers among them."""
        return descendants(_raylet(self.nodes[-1]).pid)

    def kill_node(self) -> None:
        """Kill the node that was added last."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def kill_node_of(self, worker: WorkerRecord) -> None:
        """SIGKILL the node's raylet, with which its actors end."""
        node = next(one for one in self.nodes if worker.pid in descendants(_raylet(one).pid))
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        self._cluster.head_node.all_processes["gcs_server"][0].process.kill()

    def close(self) -> None:
        self._cluster.shutdown()


def _raylet(node: Any) -> Any:
    return node.all_processes["raylet"][0].process


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A cluster without nodes besides the head."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since sockets are below it
    with pytest.MonkeyPatch.context() as patch:
        # Also of the file by which a cluster is found, which one of this machine may have
        for name, value in {**_SETTINGS, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        cluster = RayNodes(folder)
        try:
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)


class RayFleet:
    """Redis, the control plane, a client with an API of its own, and a cluster."""

    def __init__(self, stack: ExitStack, folder: Path, cluster: RayNodes) -> None:
        self.cluster = cluster
        self._server = stack.enter_context(running_server())
        self.redis_url = self._server.url
        self.queue = Queue(stack.enter_context(connect(self.redis_url)))
        self._folder, self._store = folder, folder / "store"
        stack.enter_context(running_pipeline("jobs", "--file-store", self._store, redis_url=self.redis_url, **LEASE))
        self.client = stack.enter_context(Pipeline(redis_url=self.redis_url, file_store=self._store, model="demo"))

    def kill_redis(self) -> None:
        """SIGKILL, and a start with all that it has answered."""
        keep_all_that_is_said(self._server)
        kill_and_start(self._server)

    def file(self, file_id: str | None) -> bytes:
        """The content of a file of a batch."""
        return content_of(self.queue.redis, self._folder, file_id)

    @contextmanager
    def running(self, *flags: object) -> Iterator[RunningCommand]:
        """`pipeline fleet` with these flags."""
        fleet = ["fleet", "--ray-address", self.cluster.address, "--dtype", "float32", "--max-num-seqs", 4]
        # In a folder of its own, since Ray adds that of a driver to the path of its workers
        settings = {"redis_url": self.redis_url, "folder": self._folder, **_SETTINGS, **LEASE}
        with running_pipeline(*fleet, *flags, **settings) as command:
            try:
                wait_until(
                    lambda: self.queue.on_demand() or command.process.poll() is not None,
                    START_SECONDS,
                    "the fleet to offer its model",
                )
                yield command
            except BaseException:
                print(command.output)
                raise

    def ready(self) -> list[WorkerRecord]:
        return [worker for worker in self.queue.workers() if worker.state == "ready"]

    def wait_ready(self, count: int) -> list[WorkerRecord]:
        """The workers once exactly so many take requests."""
        wait_until(lambda: len(self.ready()) == count, START_SECONDS, f"{count} workers to be ready")
        return self.ready()

    def wait_holding(self) -> WorkerRecord:
        """A worker once it holds requests."""

        def holding() -> WorkerRecord | None:
            held = self.queue.held_by([worker.id for worker in self.ready()])
            return next((worker for worker in self.ready() if held.get(worker.id)), None)

        return wait_until(holding, START_SECONDS, "a worker to hold requests")

    def held_by(self, worker: WorkerRecord) -> list[bytes]:
        """The requests that it has leases on."""
        held: Any = self.queue.redis.smembers(keys.held(worker.id))
        return list(held)

    def stays_with(self, worker: WorkerRecord, requests: Collection[bytes]) -> list[bytes]:
        """Those of the requests that are not answered, and that no other worker has claimed."""

        def stays(request: bytes) -> bool:
            batch, _, line = request.decode().partition("/")
            leased: Any = self.queue.redis.hget(keys.LEASE, request.decode())
            if leased is not None:
                return bool(leased.split()[2].decode() == worker.id)
            return bool(self.queue.redis.hexists(keys.bodies(batch), line))

        return [request for request in requests if stays(request)]


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture
def ray_fleet(cluster: RayNodes, tmp_path: Path) -> Iterator[RayFleet]:
    with ExitStack() as stack:
        yield RayFleet(stack, tmp_path, cluster)
