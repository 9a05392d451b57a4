"""The API's app in a thread of this process, on a port of its own, and clients for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn

from api.app import create_app
from api.http.http_protocol import HttpProtocol
from api.main import listen
from api.settings import ApiSettings
from tests.support.waiting import wait_until


@contextmanager
def running_api(settings: ApiSettings) -> Iterator[str]:
    """The address of a running API; `settings.port` is not looked at."""
    listener = listen("127.0.0.1", 0)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        timeout_graceful_shutdown=2,
        # A client that does not ask again loses a call for which it takes a connection that just
        # closes
        timeout_keep_alive=600,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), 60, "the API to start")
        assert server.started, "the API ended at its start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


def official_client(
    api_url: str, api_key: str = "none", on_answer: Callable[[Any], None] | None = None
) -> openai.OpenAI:
    """As a user makes it, but for retries, which would hide errors, and for certificates, which
    take 50 ms to read.
    """
    transport = openai.DefaultHttpxClient(event_hooks={"response": [on_answer] if on_answer else []}, verify=False)
    return openai.OpenAI(base_url=f"{api_url}/v1", api_key=api_key, max_retries=0, timeout=60, http_client=transport)


def plain_client(api_url: str, **options: Any) -> httpx.Client:
    """For what the official client would not send."""
    return httpx.Client(base_url=api_url, timeout=60, verify=False, **options)
