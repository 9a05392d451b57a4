"""The API's app in a thread of this process, on a port of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from api.app import create_app
from api.main import listen
from api.settings import ApiSettings
from tests.support.waiting import wait_until


@contextmanager
def running_api(settings: ApiSettings) -> Iterator[str]:
    """The address of a running API; `settings.port` is not looked at."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning", lifespan="on", timeout_graceful_shutdown=2))
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
