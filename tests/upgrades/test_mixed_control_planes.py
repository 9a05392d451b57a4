"""A ticker of one version beside processes of the other that drive batches: each line ends once,
and no batch waits for good.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchSpec, create_batch, get_batch
from jobs.queue import keys
from tests.support.batch_steps import wait_for_batch
from tests.support.control_plane import Answering, ControlPlane, check_echoes, write_input
from tests.support.integrity import faults
from tests.support.processes import catches
from tests.support.waiting import wait_until
from tests.upgrades.versions import code_of, unpack_previous

pytestmark = pytest.mark.proof

LINES = 9000  # more than are in Redis at once
_CREATE = """
import json, sys
from jobs.batch.client import BatchSpec, create_batch
from jobs.queue.connection import connect
spec = json.loads(sys.argv[2])
print(create_batch(connect(sys.argv[1]), BatchSpec(**spec)).id)
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_previous(tmp_path_factory.mktemp("previous"))


class Site:
    """Batches, and processes of both versions."""

    def __init__(self, url: str, client: redis.Redis, path: Path, previous: Path) -> None:
        self.client = client
        self.plane = ControlPlane(url)
        self.old: dict[str, subprocess.Popen[bytes]] = {}
        self._url, self._path, self._tree = url, path, previous
        self._environment = {**os.environ, **code_of(previous)}
        self.batches: list[str] = []

    def start_old(self, name: str, *arguments: str) -> None:
        """Start a process of the last version, once that can end in order."""
        command = [sys.executable, "-m", *arguments, "--redis-url", self._url]
        process = self.old[name] = subprocess.Popen(command, env=self._environment, cwd=self._tree)
        wait_until(lambda: catches(process.pid, signal.SIGTERM), 60, f"{name} to be up")

    def stop_old(self, name: str) -> None:
        self.old[name].terminate()
        assert self.old.pop(name).wait(60) == 0, name

    def kill_old(self, name: str) -> None:
        process = self.old.pop(name)
        process.kill()
        process.wait()

    def wait_led(self) -> None:
        wait_until(lambda: self.client.exists(keys.LEADER), 60, "a ticker to lead")

    def create(self) -> str:
        """Make a batch by this version."""
        return self._add(create_batch(self.client, BatchSpec(**self._spec())).id)

    def create_by_old(self) -> str:
        command = [sys.executable, "-c", _CREATE, self._url, json.dumps(self._spec())]
        done = subprocess.run(command, env=self._environment, cwd=self._tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return self._add(done.stdout.strip())

    def wait_under_way(self, batches: Sequence[str]) -> None:
        """Wait until some lines of each are done, and not all."""
        for batch in batches:
            wait_until(lambda batch=batch: self._completed(batch), 60, f"lines of {batch}")  # type: ignore[misc]
        assert not all(get_batch(self.client, batch).ended for batch in batches)

    def check_ends(self) -> None:
        """Every line of every batch is answered once, and nothing contradicts itself."""
        for number, batch in enumerate(self.batches):
            assert wait_for_batch(self.client, batch, 120).completed == LINES
            check_echoes(self._folder(number) / "out.jsonl", LINES)
        assert faults(self.client) == []

    def _completed(self, batch: str) -> int:
        processes = {**self.old, **self.plane.processes}
        ended = {name: process.returncode for name, process in processes.items() if process.poll() is not None}
        assert not ended, f"processes ended by themselves: {ended}"
        return get_batch(self.client, batch).completed

    def kill(self) -> None:
        for process in [*self.old.values(), *self.plane.processes.values()]:
            process.kill()
            process.wait()

    def _spec(self) -> dict[str, object]:
        folder = self._folder(len(self.batches))
        source = write_input(folder / "in.jsonl", LINES)
        root, output = str(folder / "parts"), str(folder / "out.jsonl")
        return {"input": str(source), "root": root, "output": output, "error_file": "inline", "models": ("m",)}

    def _add(self, batch: str) -> str:
        self.batches.append(batch)
        return batch

    def _folder(self, number: int) -> Path:
        return self._path / f"batch-{number}"


@pytest.fixture
def site(redis_url: str, redis_client: redis.Redis, tmp_path: Path, previous: Path) -> Iterator[Site]:
    site = Site(redis_url, redis_client, tmp_path, previous)
    try:
        yield site
    finally:
        site.kill()


@contextmanager
def worker(url: str) -> Iterator[None]:
    """One that leaves time for what happens meanwhile."""
    with Answering(url, limit=100, pause=0.02):
        yield


def test_an_old_ticker_leads_processes_of_this_version(site: Site, redis_url: str) -> None:
    site.start_old("ticker", "jobs.control.ticker")
    site.wait_led()
    site.plane.start("driver", "twin")
    with worker(redis_url):
        batches = [site.create() for _ in range(3)]
        site.wait_under_way(batches)
        site.check_ends()
        batches = [site.create() for _ in range(3)]
        site.wait_under_way(batches)
        site.plane.kill("driver")
        site.plane.start("ticker")
        site.stop_old("ticker")
        site.check_ends()


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_ticker_of_this_version_leads_old_and_new_processes(site: Site, redis_url: str, is_killed: bool) -> None:
    site.start_old("driver", "jobs.control.rq_worker")
    site.plane.start("ticker")
    with worker(redis_url):
        batches = [site.create_by_old(), site.create()]
        site.wait_under_way(batches)
        site.plane.start("driver")
        (site.kill_old if is_killed else site.stop_old)("driver")
        site.create_by_old()
        site.check_ends()
    site.plane.stop()
