"""Fixtures: an API process' app in a thread, on a real Redis, with the official client and a worker that follows a script."""

import threading
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn

from api.app import create_app
from api.main import listen
from api.settings import ApiSettings
from jobs.queue import Queue
from jobs.requests import Claim
from tests.api.scripted_worker import Answer, ScriptedWorker
from tests.support.waiting import wait_until


@pytest.fixture
def api_url(redis_url: str) -> Iterator[str]:
    """The address of a running API."""
    listener = listen("127.0.0.1", 0)
    app = create_app(ApiSettings(REDIS_URL=redis_url, ping_seconds=0.2))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started, 60, "the API to start")
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    listener.close()


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
