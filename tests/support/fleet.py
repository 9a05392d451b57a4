"""A whole fleet on one machine: Redis, control plane, workers and an API, each a command of its
own, and a supervisor for all of them.

Every worker reaches Redis through a proxy and has a clock of its own, so that its network and its
clock can be broken alone.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import httpx
import redis

from jobs.process import die_with_parent
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from tests.support import http_calls
from tests.support.clock import Clock
from tests.support.commands import command, command_environment
from tests.support.lossy_proxy import LossyProxy
from tests.support.ports import reserved_port
from tests.support.processes import catches, command_line, descendants
from tests.support.redis_machine import RedisMachine
from tests.support.shims import joined
from tests.support.slow_folders import SlowFolders
from tests.support.waiting import wait_until

START_SECONDS = 120.0
STOP_SECONDS = 60.0
PATIENCE_SECONDS = 60.0  # what the API waits for a Redis that is away before live calls fail
LOST_BATCH_SECONDS = 15.0  # in which a batch whose folder is gone ends
_RESTART_PAUSE = 0.5  # what a supervisor takes to start a process again


class Member:
    """One process and its successors: whenever it ends, the supervisor starts the next."""

    def __init__(self, name: str, arguments: Sequence[object], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log_path = log
        self.exits: list[int] = []  # how each but the last ended
        self._command = command(*arguments)
        self._environment = dict(environment)
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_settled(self) -> bool:
        """Whether it is past its start, and it was not ordered to stop: another order would then be
        its first.
        """
        return self.is_running and not self._is_leaving and catches(self.pid, signal.SIGTERM)

    @property
    def log(self) -> str:
        """What it and those before it printed."""
        return self.log_path.read_text(errors="replace")

    def below(self, part: str) -> list[int]:
        """Its descendants whose command line holds `part`."""
        return [pid for pid in descendants(self.pid) if part in command_line(pid)]

    def send(self, number: signal.Signals) -> None:
        """Does nothing to one that has ended."""
        self._is_leaving = True if number == signal.SIGTERM else self._is_leaving
        self._process.send_signal(number)

    def look_after(self) -> None:
        """What the supervisor does now and then."""
        if self._process.poll() is None:
            return
        if not self._ended_at:
            self.exits.append(self._process.returncode)
            self._ended_at = time.monotonic()
        elif time.monotonic() - self._ended_at > _RESTART_PAUSE:
            self._start()

    def stop(self) -> int:
        """SIGTERM, and the exit code. One that does not end in time is killed."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._ended_at, self._is_leaving = 0.0, False
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
                start_new_session=True,
            )


class LocalFleet:
    """Belongs to the thread that made it, which calls `look_after` (or `wait`) often: the kernel
    ties processes to their thread.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        workers: int,
        lease_seconds: float,
        stream_interval: float,
        max_num_seqs: int,
        api: bool,
        embedder: Path | None,
        cache_bytes: int | None,
    ) -> None:
        self.folder = folder
        self.lease_seconds = lease_seconds
        self._stack = stack
        self.store = folder / "store"
        self.store_settings: dict[str, str] = {}
        self.file_store = self.start_store()
        url = self.start_redis()
        settings = QueueSettings(lease_seconds=lease_seconds, redis_retry_seconds=2.0)
        self.client = connect(url)
        self.queue = Queue(self.client, settings)
        self.clocks: dict[str, Clock] = {}
        self.slow_folders = SlowFolders(folder / "slow-folders")
        """As the control plane sees them."""
        self.members: dict[str, Member] = {}
        stack.callback(self.kill)
        queue_flags = ("--lease-seconds", lease_seconds, "--stream-interval", stream_interval)
        store_flags = ("--file-store", self.file_store)
        self._add("jobs", url, "jobs", *store_flags, *queue_flags, preload=self.slow_folders.environment)
        self.api_url = None
        if api:
            port = stack.enter_context(reserved_port())
            self._add("api", url, "api", "--port", port, *store_flags)
            self.api_url = f"http://127.0.0.1:{port}"
        flags = ("--dtype", "float32", "--max-num-seqs", max_num_seqs, "--shutdown-timeout", 2, *queue_flags)
        flags += ("--kv-cache-memory-bytes", cache_bytes) if cache_bytes else ()
        models = [()] * workers + ([("--model", embedder, "--served-model-name", "embed")] if embedder else [])
        for number, (worker_url, model) in enumerate(zip(self.worker_urls(url, len(models)), models, strict=True)):
            self._add(f"worker-{number}", worker_url, "worker", *model, *flags)

    def start_store(self) -> str:
        """Start what holds the file store; return its location, of which `store_settings` says more
        to the processes.
        """
        return str(self.store)

    def start_redis(self) -> str:
        """Start what holds the queue; return its URL."""
        self.redis = RedisMachine(self.folder / "redis")
        self.redis.start()
        self._stack.callback(self.redis.stop)
        return self.redis.url

    def worker_urls(self, url: str, workers: int) -> list[str]:
        """Where each worker reaches the queue."""
        self.proxies = [self._stack.enter_context(LossyProxy(url)) for _ in range(workers)]
        return [proxy.url for proxy in self.proxies]

    @property
    def servers(self) -> set[int]:
        """Process ids of what `start_redis` and `start_store` started."""
        return {self.redis.pid}

    def history(self) -> str:
        """Return the name of what Redis holds, where another server may take over with less."""
        return ""

    @property
    def clock_lead(self) -> float:
        """Seconds by which the clock of the control plane is ahead of Redis'."""
        return self.clocks["jobs"].offset - self.redis.clock.offset

    @property
    def workers(self) -> list[Member]:
        return [member for name, member in self.members.items() if name.startswith("worker")]

    @property
    def exits(self) -> dict[str, list[int]]:
        """How the processes ended that did."""
        return {name: member.exits for name, member in self.members.items() if member.exits}

    def look_after(self) -> None:
        """Starts again what ended; the test that stopped Redis starts it again."""
        for member in self.members.values():
            member.look_after()

    def wait(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Waits as `wait_until`, looking after the fleet; a condition that needs Redis or the API
        is not yet met while they are away.
        """

        def met() -> bool:
            self.look_after()
            try:
                return bool(condition())
            except (redis.RedisError, QueueUnavailable, httpx.TransportError):
                return False

        wait_until(met, timeout, what)

    def wait_ready(self) -> None:
        """Until no process is about to start or to end, every worker takes requests and the API
        serves them.
        """
        self.wait(
            lambda: all(member.is_settled for member in self.members.values()),
            START_SECONDS,
            "the processes to be there",
        )
        self.wait(
            lambda: self.ready_workers() >= {worker.pid for worker in self.workers},
            START_SECONDS,
            "the workers to be ready",
        )
        if self.api_url is not None:
            self.wait(
                lambda: http_calls.get(f"{self.api_url}/health").json().get("models"),
                START_SECONDS,
                "the API to serve the model",
            )

    def ready_workers(self) -> set[int]:
        """Process ids of those that take requests."""
        return {worker.pid for worker in self.queue.workers() if worker.state == "ready"}

    def stop(self, *kinds: str) -> dict[str, int]:
        """SIGTERM to the processes of these kinds (api, worker, jobs), one kind after the other;
        the exit codes.
        """
        return {name: self.members[name].stop() for kind in kinds for name in self.members if name.startswith(kind)}

    def kill(self) -> None:
        """Ends everything that still runs."""
        for member in self.members.values():
            member.send(signal.SIGKILL)
        for member in self.members.values():
            wait_until(lambda member=member: not member.is_running, STOP_SECONDS, f"the end of {member.name}")

    def _add(
        self, name: str, redis_url: str, *arguments: object, preload: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        clock = self.clocks[name] = Clock(self.folder / f"{name}.clock")
        settings = {"REDIS_RETRY_SECONDS": str(PATIENCE_SECONDS), "LOST_BATCH_SECONDS": str(LOST_BATCH_SECONDS)}
        environment = command_environment(redis_url, joined(clock.environment, preload, settings, self.store_settings))
        self.members[name] = Member(name, arguments, environment, self.folder / f"{name}.log")


Fleet = TypeVar("Fleet", bound=LocalFleet)


@contextmanager
def running_fleet(
    folder: Path | None = None,
    *,
    workers: int = 1,
    lease_seconds: float = 2.0,
    stream_interval: float = 0.2,
    max_num_seqs: int = 16,
    api: bool = False,
    embedder: Path | None = None,
    cache_bytes: int | None = None,
    kind: type[Fleet] = LocalFleet,  # type: ignore[assignment]
) -> Iterator[Fleet]:
    """A fleet whose workers are ready; one more has the model in the folder `embedder`.

    No process of it is left at the end, and no file if it had to make its own folder.
    """
    with ExitStack() as stack:
        own = None if folder else stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-"))
        fleet = kind(
            folder or Path(str(own)),
            stack,
            workers=workers,
            lease_seconds=lease_seconds,
            stream_interval=stream_interval,
            max_num_seqs=max_num_seqs,
            api=api,
            embedder=embedder,
            cache_bytes=cache_bytes,
        )
        fleet.wait_ready()
        yield fleet
