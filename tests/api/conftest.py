"""Fixtures: an API process' app in a thread, on a real Redis, with the official client and a worker
that follows a script.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from api.http import lingering
from api.settings import ApiSettings
from jobs.control import advance, ticker, upkeep
from jobs.protocol.requests import Claim
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import Answer, ScriptedWorker
from tests.support.api_server import official_client, plain_client, running_api


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and ticks that a test runs in its own process do all that they find, however long the
    machine holds them up.
    """
    monkeypatch.setattr(advance, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(ticker, "MOMENT_SECONDS", 60.0)
    monkeypatch.setattr(upkeep, "MOMENT_SECONDS", 60.0)


@pytest.fixture
def api_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """The address of a running API."""
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), ping_seconds=0.2)) as url:
        yield url


@pytest.fixture
def client(api_url: str) -> Iterator[openai.OpenAI]:
    """The official client, without retries."""
    with official_client(api_url) as client:
        yield client


@pytest.fixture
def http(api_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with plain_client(api_url) as client:
        yield client


@pytest.fixture
def long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a client that sends more than a busy machine takes in within the usual time."""
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 60.0)


@pytest.fixture
def scripted(queue: Queue) -> Iterator[Callable[..., ScriptedWorker]]:
    """Starts a scripted worker: `scripted(lambda claim: ["some ", "text"])`."""
    running: list[ScriptedWorker] = []

    def start(script: Callable[[Claim], Answer], **options: object) -> ScriptedWorker:
        running.append(ScriptedWorker(queue, script, **options).__enter__())  # type: ignore[arg-type]
        return running[-1]

    yield start
    for worker in running:
        worker.__exit__()
