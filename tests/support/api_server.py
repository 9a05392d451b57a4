"""The API's app in a thread of this process, on a port of its own, and clients for it."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from api.app import create_app
from api.http.listening import listen
from api.http.server import HttpServer
from api.settings import ApiSettings
from tests.support.waiting import wait_until


@contextmanager
def running_api(
    settings: ApiSettings,
    *,
    scheme: str = "http",
    keep_alive: int = 600,
    app: FastAPI | None = None,
    with_data: bool = False,
) -> Iterator[str]:
    """The address of a running API, of `app` where that is given; `settings.port` is not looked at.

    By default, no idle connection is closed: a client that does not ask again loses a call for
    which it takes one that just closes. A connection is accepted once it has come, or `with_data`
    once its first bytes have, however long the client is held up before it sends them.
    """
    listener = listen("127.0.0.1", 0)
    if with_data:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 60)
    server = HttpServer(app or create_app(settings), replace(settings, timeout_keep_alive=keep_alive), 2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), 60, "the API to start")
        assert server.started, "the API ended at its start"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


def failing_app(settings: ApiSettings) -> FastAPI:
    """The API's app with a fault in it, which the path /failing/ANYTHING shows."""

    async def fail() -> None:
        raise ZeroDivisionError("a detail")

    app = create_app(settings)
    app.add_api_route("/failing/{name}", fail)
    return app


def answer_in_process(app: FastAPI, path: str) -> httpx.Response:
    """What an app answers that was not started, and so has no Redis."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(call())


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
