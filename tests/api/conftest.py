"""Fixtures: an API process' app in a thread, on a real Redis, with the official client and a worker that follows a script."""

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from api.settings import ApiSettings
from jobs.queue import Queue
from jobs.requests import Claim
from tests.api.scripted_worker import Answer, ScriptedWorker
from tests.support.api_server import running_api


@pytest.fixture
def api_url(redis_url: str) -> Iterator[str]:
    """The address of a running API."""
    with running_api(ApiSettings(REDIS_URL=redis_url, ping_seconds=0.2)) as url:
        yield url


@pytest.fixture
def client(api_url: str) -> Iterator[openai.OpenAI]:
    """The official client, without retries."""
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(api_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=api_url, timeout=60) as client:
        yield client


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
