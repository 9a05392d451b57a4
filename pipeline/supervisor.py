"""Supervision of all processes on one machine: a private Redis, if none is given, and children."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from api.http.listening import SharedListener
from batch_inference_pipeline.command import python_command
from batch_inference_pipeline.private_folder import private_folder
from jobs.queue.settings import QueueSettings
from pipeline.child import Child
from pipeline.errors import ChildFailed
from pipeline.kept_server import KeptServer
from pipeline.options import CHILD_VARIABLE
from workers.engine.messages.config import all_threads

if TYPE_CHECKING:
    from jobs.queue.request_queue import Queue

_STOP_SECONDS = 15.0
_JOB_PROCESSES = 2


class Supervisor:
    """Starts children with the `start_` methods, and keeps them running with `check`.

    Leaving the context stops them gracefully. Without `redis_url` a private Redis is started in a
    temporary folder, which is removed at the end.
    """

    def __init__(
        self,
        redis_url: str | None,
        settings: QueueSettings,
        say: Callable[[str], None],
        log_level: str = "info",
        *,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        """Set up the supervisor; each kind of child has `stop_seconds` to end when stopped."""
        self.settings = settings
        self._stop_seconds = stop_seconds
        self._log_level = log_level
        self._given_url = redis_url
        self._say = say
        self._server: KeptServer | None = None
        self._children: list[Child] = []
        self._on_failure: dict[Child, Callable[[ChildFailed], None]] = {}
        self._listener: SharedListener | None = None
        self._exit = contextlib.ExitStack()
        self._queue: Queue | None = None
        self._rest: list[Child] = []  # other processes of the control plane, which may start later
        self._environment: dict[str, str] = {}

    def __enter__(self) -> "Supervisor":
        with contextlib.ExitStack() as self._exit:
            if self._given_url is None:
                folder = self._exit.enter_context(private_folder())
                self._server = self._exit.enter_context(KeptServer(folder / "redis", self._say))
            else:
                self._queue = self._connect()
            settings = replace(self.settings, redis_url=self.redis_url)
            self._environment = {CHILD_VARIABLE: "1", **settings.environment()}
            self._exit = self._exit.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._exit.close()

    @property
    def queue(self) -> "Queue":
        """Return the queue of all children.

        The first use imports its modules, after the children were started.
        """
        if self._queue is None:
            self._queue = self._connect()
        return self._queue

    @property
    def redis_url(self) -> str:
        """Return the URL of the queue."""
        if self._given_url is not None:
            return self._given_url
        assert self._server is not None
        return self._server.url

    def start_jobs(self, file_store: str | None = None, rest_after: float = 0.0) -> None:
        """Start the control plane: two RQ workers and the ticker.

        The ticker rebuilds an empty Redis from the `file_store`. `check` starts all but the first
        process after `rest_after` seconds, or as soon as that process or a private Redis has
        ended. Raise `SettingsError` for webhooks without a usable secret.
        """
        if file_store is not None:
            self.settings.webhook_key()
        first, *others = (f"jobs-{number}" for number in range(_JOB_PROCESSES))
        command = partial(python_command, "jobs.control.rq_worker")
        self._add(first, command, on_death=self._start_rest)
        self._rest = [self._add(name, command, later=rest_after) for name in others]
        store = ["--file-store", file_store] if file_store is not None else []
        self._rest.append(self._add("ticker", partial(python_command, "jobs.control.ticker", *store), later=rest_after))

    def start_workers(
        self,
        arguments: list[str],
        replicas: int = 1,
        name: str = "",
        on_failure: Callable[[ChildFailed], None] | None = None,
    ) -> list[Child]:
        """Start model replicas, each a worker process with an engine core, on different GPUs.

        `arguments` are flags of `pipeline worker`. `name` distinguishes the workers of one model
        from the workers of another. With `on_failure`, a failed replica is passed to it, and a
        replica that the system cannot start is tried again; without it, a failure ends the
        supervisor.
        """
        # Always set, since the child may inherit another value from the environment
        fixed = ("--log-level", self._log_level, "--data-parallel-size", "1")
        command = partial(python_command, "pipeline", "worker", *fixed, *arguments)
        kind = f"worker-{name}" if name else "worker"
        must_start = on_failure is None
        if replicas == 1:
            started = [self._add(kind, command, on_death=self._bury, named=bool(name), must_start=must_start)]
        else:
            threads = {"OMP_NUM_THREADS": str(max(1, all_threads() // replicas))}
            started = [
                self._add(f"{kind}-{number}", command, threads, on_death=self._bury, named=True, must_start=must_start)
                for number in range(replicas)
            ]
        if on_failure is not None:
            self._on_failure |= dict.fromkeys(started, on_failure)
        return started

    def forget(self, children: Iterable[Child]) -> None:
        """Remove stopped children from the supervisor."""
        for child in children:
            self._children.remove(child)
            self._on_failure.pop(child, None)

    def start_api(self, arguments: list[str], listener: socket.socket | None = None, count: int = 1) -> None:
        """Start `count` API processes.

        They share `listener`; without one, each listens by itself. `arguments` are the flags of
        `pipeline api`.
        """
        command = partial(python_command, "pipeline", "api", "--log-level", self._log_level, *arguments)
        if listener is None:
            self._add("api", command)
            return
        shared = self._listener = SharedListener(listener, count)
        for number in range(count):
            self._add(
                "api" if count == 1 else f"api-{number}",
                command,
                shared.environment(number),
                on_death=partial(self._leave, number),
                named=count > 1,
                descriptors=shared.descriptors,
            )

    def start_placement(self, environment: Mapping[str, str]) -> Child:
        """Start the process that places workers on a Ray cluster."""
        return self._add("fleet", partial(python_command, "pipeline.ray.placement"), environment)

    def check(self) -> float:
        """Restart ended children, and start children whose start is due.

        Return the most seconds until the next call. Raises `ChildFailed`.
        """
        if self._server is not None and self._server.failure is not None:
            raise ChildFailed(self._server.failure)
        if self._server is not None and self._server.starts > 1:
            self._start_rest()
        for child in list(self._children):
            try:
                child.check()
            except ChildFailed as error:
                if child not in self._on_failure:
                    raise
                self._on_failure[child](error)
        pauses = [child.pause_left for child in self._children]
        return min((pause for pause in pauses if pause is not None), default=5.0)

    def has(self, kind: str) -> bool:
        """Return whether there is a child whose name begins with `kind` and was not stopped."""
        return any(child.name.startswith(kind) for child in self._children)

    def stop(self, only: str = "", insisted: Callable[[], bool] = lambda: False) -> None:
        """Stop the children whose name begins with `only`: API, then workers, then control plane.

        Each kind has some time to end gracefully, until `insisted()` is true.
        """
        if self._listener is not None and "api".startswith(only):
            self._listener.close()
        for kind in ("api", "worker", "fleet", "jobs", "ticker"):
            chosen = [child for child in self._children if child.name.startswith(kind) and child.name.startswith(only)]
            deadline = time.monotonic() + self._stop_seconds
            for child in chosen:
                child.ask_to_stop()
            for child in chosen:
                child.wait_until_stopped(deadline, insisted)
                self._children.remove(child)

    def kill(self) -> None:
        """Kill every child at once; for use when their state is not needed."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait_until_stopped(0.0)
        self._children.clear()

    def _add(
        self,
        name: str,
        command: Callable[[], list[str]],
        environment: Mapping[str, str] | None = None,
        on_death: Callable[[int], None] = lambda pid: None,
        named: bool = False,
        descriptors: tuple[int, ...] = (),
        must_start: bool = True,
        later: float = 0.0,
    ) -> Child:
        variables = {**self._environment, **(environment or {})}
        child = Child(name, command, variables, self._say, on_death, named=named, descriptors=descriptors)
        if later:
            child.start_later(later)
        elif must_start:
            child.start()
        else:
            child.start_or_retry()
        self._children.append(child)
        return child

    def _connect(self) -> "Queue":
        from jobs.queue.connection import check_server, connect
        from jobs.queue.request_queue import Queue

        client = self._exit.enter_context(connect(self.redis_url))
        if self._server is None:  # a private Redis needs no check, and may be restarting
            check_server(client)
        return Queue(client, self.settings)

    def _start_rest(self, _pid: int = 0) -> None:
        """Start the other control plane processes, once; they take over from an ended one."""
        for child in self._rest:
            child.start_later(0.0)
        self._rest = []

    def _leave(self, number: int, _pid: int) -> None:
        if self._listener is not None:
            self._listener.leave(number)

    def _bury(self, pid: int) -> None:
        """Requeue the requests of a dead worker at once, if Redis answers.

        Otherwise the ticker requeues them one lease later.
        """
        import redis

        from jobs.queue.request_queue import Queue
        from jobs.queue.scripts import QueueUnavailable

        # Without retries, since they would delay the response to a stop signal
        queue = Queue(self.queue.redis, replace(self.settings, redis_retry_seconds=0.0))
        with contextlib.suppress(QueueUnavailable, redis.RedisError):
            for record in queue.workers():
                if record.pid == pid and record.host == socket.gethostname():
                    queue.remove_worker(record.id)
