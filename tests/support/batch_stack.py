"""Everything that a batch needs, started once for many tests: a Redis of its own, a control plane,
an API, a worker that echoes.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.settings import ApiSettings
from jobs.protocol.chat import CHAT
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.api_server import running_api
from tests.support.control_plane import Answering, control_plane, echo
from tests.support.integrity import faults
from tests.support.redis_server import running_server

AWAY = "away"  # a model that is known and that no worker serves at the moment: its lines wait


@dataclass(frozen=True)
class BatchStack:
    """Where its parts are.

    `settings` are those of the API; another one can be started on the same queue with others.
    """

    redis_url: str
    store: Path
    api_url: str
    settings: ApiSettings


@contextmanager
def running_stack(folder: Path, completion_windows: tuple[str, ...] = ("24h",)) -> Iterator[BatchStack]:
    """A stack whose model `m` answers as `echo` does, or with the status that a line asks for
    (`fail 429`).
    """
    store = folder / "store"
    with ExitStack() as stack:
        redis_url = stack.enter_context(running_server()).url
        stack.callback(_check, redis_url)
        _announce(redis_url, AWAY)
        stack.enter_context(control_plane(redis_url, ("--file-store", str(store)), {"FILE_STORE": str(store)}))
        settings = ApiSettings(redis_url=redis_url, file_store=str(store), completion_windows=completion_windows)
        api_url = stack.enter_context(running_api(settings))
        stack.enter_context(serving(redis_url, "m"))
        yield BatchStack(redis_url, store, api_url, settings)


def echo_or_fail(claim: Claim) -> Result:
    """The echo, or the error of the status that a chat names."""
    said = json.loads(claim.request.body)["messages"][-1].get("content") if claim.request.endpoint == CHAT else None
    failure = re.fullmatch(r"fail ([45]\d\d)", said) if isinstance(said, str) else None
    if failure is not None:
        return ApiError(int(failure[1]), "no such luck", code="bad_luck").result(f"req_{claim.key.line}")
    return echo(claim)


@contextmanager
def serving(redis_url: str, model: str) -> Iterator[None]:
    """A worker for a model.

    When it has gone no process waits for it, as for one whose record lasts some leases longer.
    """
    with Answering(redis_url, echo_or_fail, models=(model,)) as worker:
        yield
    with _queue(redis_url) as queue:
        queue.remove_worker(worker.name)


@contextmanager
def serving_the_away(stack: BatchStack) -> Iterator[None]:
    """Lets the lines that wait be answered."""
    with serving(stack.redis_url, AWAY):
        yield


def _announce(redis_url: str, model: str) -> None:
    with _queue(redis_url) as queue:
        queue.register_worker(WorkerRecord("came-and-went", [model], "ready", 4096, time.time(), "test", 1))
        queue.remove_worker("came-and-went")


@contextmanager
def _queue(redis_url: str) -> Iterator[Queue]:
    with closing(connect(redis_url)) as client, closing(Queue(client)) as queue:
        yield queue


def _check(redis_url: str) -> None:
    """What is left in the queue when everybody has gone must fit together."""
    with closing(connect(redis_url)) as client:
        assert faults(client) == []
