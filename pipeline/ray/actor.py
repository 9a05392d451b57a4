"""A Ray actor that keeps one worker process running on its node."""

import os
import socket
import threading
from dataclasses import dataclass, fields

import ray

from jobs.queue.settings import QueueSettings
from jobs.settings import variable
from pipeline.errors import explained, one_line
from pipeline.ray.spec import WorkerSpec, decode_worker
from pipeline.supervisor import Supervisor

_CHECK_SECONDS = 0.2


@dataclass(frozen=True)
class ActorStatus:
    """The status that an actor reports."""

    node: str
    digest: str  # digest of the worker's spec
    draining: bool
    ended: bool  # no worker process is left, and none will be started
    failure: str  # reason of an unexpected end, else ""


class WorkerActor:
    """Starts a worker process, restarts it, and drains it on request; then the actor ends.

    The kernel kills the process when the actor's thread that started it ends.
    """

    def __init__(self, packed: bytes) -> None:
        spec = decode_worker(packed)
        context = ray.get_runtime_context()
        self._digest = spec.digest()
        self._node = f"{socket.gethostname()} ({context.get_node_id()[:8]})"
        self._actor = context.current_actor
        self._draining = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, args=(spec,), name="supervisor", daemon=True)
        self._thread.start()

    def status(self) -> ActorStatus:
        """Return the actor's status."""
        ended = not self._thread.is_alive()
        return ActorStatus(self._node, self._digest, self._draining.is_set(), ended, self._failure)

    def drain(self) -> None:
        """Begin to stop the worker; it requeues requests that it cannot finish in time."""
        self._draining.set()

    def _run(self, spec: WorkerSpec) -> None:
        try:
            self._supervise(spec)
        except Exception as error:
            end = explained(error)
            self._failure = one_line(getattr(error, "message", error) if end is None else end.message)
        if self._draining.is_set():  # Ray would restart the actor, and the fleet process may be gone
            ray.kill(self._actor, no_restart=True)

    def _supervise(self, spec: WorkerSpec) -> None:
        _set_environment(spec)
        settings = QueueSettings.from_environment()
        url, seconds = settings.redis_url, spec.stop_seconds
        arguments = [*spec.arguments, "--shutdown-timeout", str(spec.shutdown_timeout)]
        with Supervisor(url, settings, _say, spec.log_level, stop_seconds=seconds) as supervisor:
            supervisor.start_workers(arguments)
            while not self._draining.wait(min(supervisor.check(), _CHECK_SECONDS)):
                pass


def _set_environment(spec: WorkerSpec) -> None:
    """Replace this node's settings by the fleet's settings."""
    ours = {variable(one) for one in fields(QueueSettings)}
    for name in [name for name in os.environ if name in ours or name.startswith("PIPELINE_")]:
        del os.environ[name]
    os.environ.update(spec.environment)


def _say(line: str) -> None:
    print(line, flush=True)  # into the actor's log, where Ray keeps it
