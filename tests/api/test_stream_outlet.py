"""The short way of tokens into a socket: what the reader writes while the stream's task waits."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import h11
import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from api.http.event_stream import EventStream, event
from api.http.http_protocol import AddressCounts, FullServer, HttpProtocol
from api.http_settings import HttpSettings
from api.inbox import Inbox
from api.settings import ApiSettings
from jobs.protocol.requests import Claim, RequestKey, StreamEntry, TokenChunk
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import plain_client, running_api
from tests.support.raw_http import answer_on, connected

PIECES = [f"{number} " for number in range(30)]
CALL = {"model": MODEL, "prompt": "x", "stream": True}


class ShownText:
    """An outlet that keeps what it is to write."""

    def __init__(self) -> None:
        self.writable = True
        self.written: list[bytes] = []

    def show(self, entries: list[StreamEntry]) -> bytes:
        return "".join(chunk.text for entry in entries for chunk in entry.chunks).encode()

    def write(self, shown: bytes) -> None:
        self.written.append(shown)


def entry_of(key: RequestKey, number: int) -> StreamEntry:
    return StreamEntry(key, f"{number + 1}-0", [TokenChunk(0, number, [number], str(number), number)])


def test_entries_pass_a_task_that_waits_and_wake_it_where_the_outlet_is_closed(queue: Queue) -> None:
    async def run() -> tuple[bytes, bytes, StreamEntry | None]:
        inbox, outlet = Inbox(RequestKey("live_a", 0), queue), ShownText()
        inbox.outlet = outlet
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.put(entry_of(inbox.key, 0))
        inbox.put(entry_of(inbox.key, 1))
        together = inbox.deliver()
        outlet.writable = False
        inbox.put(entry_of(inbox.key, 2))
        late = inbox.deliver()
        return together, late, await waiting

    together, late, entry = asyncio.run(asyncio.wait_for(run(), 60))
    assert (together, late) == (b"01", b"")
    assert entry is not None
    assert entry.entry_id == "3-0"


def test_what_cannot_be_shown_ends_its_own_call_alone(queue: Queue) -> None:
    class Broken(ShownText):
        def show(self, entries: list[StreamEntry]) -> bytes:
            raise LookupError("no such choice")

    async def run() -> None:
        inbox = Inbox(RequestKey("live_a", 0), queue)
        inbox.outlet = Broken()
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.put(entry_of(inbox.key, 0))
        assert inbox.deliver() == b""
        await waiting

    with pytest.raises(LookupError):
        asyncio.run(asyncio.wait_for(run(), 60))


def test_the_chunks_of_a_stream_are_those_of_http(api_url: str, scripted: Callable[..., ScriptedWorker]) -> None:
    """By h11's own reading of the connection, each event in a chunk that nothing else is in."""
    scripted(lambda claim: PIECES)
    body = json.dumps(CALL).encode()
    reading = h11.Connection(h11.CLIENT)
    asked = reading.send(
        h11.Request(
            method="POST",
            target="/v1/completions",
            headers=[("host", "localhost"), ("content-length", str(len(body))), ("content-type", "application/json")],
        )
    )
    received = b""
    with connected(api_url) as connection:
        connection.sendall((asked or b"") + (reading.send(h11.Data(data=body)) or b""))
        reading.send(h11.EndOfMessage())
        while not isinstance(happened := reading.next_event(), h11.EndOfMessage):
            if happened is h11.NEED_DATA:
                reading.receive_data(connection.recv(65536))
            elif isinstance(happened, h11.Data):
                received += happened.data
    assert text_of(received) == "".join(PIECES)
    assert received.endswith(b"data: [DONE]\n\n")


class Louder:
    """Middleware that changes the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_louder(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = message["body"].replace(b"word", b"WORD")
            await send(message)

        await self._app(scope, receive, send_louder)


def test_middleware_of_the_operator_gets_every_part_of_a_stream(
    redis_url: str, tmp_path: Any, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: ["word "] * 30)
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), middleware=(f"{__name__}.Louder",))
    with running_api(settings) as url, plain_client(url) as http:
        assert text_of(http.post("/v1/completions", json=CALL).content) == "WORD " * 30


def test_one_connection_takes_a_stream_and_then_another_call(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: PIECES)
    for _ in range(3):
        assert text_of(http.post("/v1/completions", json=CALL).content) == "".join(PIECES)
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL


def test_a_client_that_does_not_read_fills_its_connection_and_nothing_else() -> None:
    """What is over goes by the task, which waits; nothing is lost."""
    part = event({"text": "x" * 10_000})

    async def run(connection: socket.socket, stream: EventStream, transport: asyncio.Transport) -> bytes:
        written = 0
        while stream.writable:
            stream.write_now(part)
            written += len(part)
            # uvloop hands to the kernel at once, asyncio too: what is left is the process' own
            assert transport.get_write_buffer_size() < transport.get_write_buffer_limits()[1] + 2 * len(part)
        received = b""
        while not stream.writable or received.count(part) < written // len(part):
            received += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
        return received[received.index(b"data") :]

    body = asyncio.run(asyncio.wait_for(_with_a_stream(run), 60))
    assert body.count(part) > 1


def test_a_call_whose_client_reads_late_loses_nothing(api_url: str, scripted: Callable[..., ScriptedWorker]) -> None:
    """Its answer is more than the sockets between them hold, and than waits for one call."""
    pieces, said = [f"{number:5}" * 780 for number in range(1500)], threading.Event()

    def script(_claim: Claim) -> Iterator[str]:
        yield from pieces
        said.set()

    scripted(script)
    with connected(api_url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        body = json.dumps(CALL).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert said.wait(120)
        text = text_of(answer_on(connection).content)  # type: ignore[attr-defined]
    complete = text == "".join(pieces)  # pytest would compare megabytes
    assert complete


async def _with_a_stream(
    run: Callable[[socket.socket, EventStream, asyncio.Transport], Awaitable[bytes]],
) -> bytes:
    """What `run` returns of an event stream on a socket, without an app around it."""
    ends = asyncio.Event()
    began = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        began.set()
        await ends.wait()
        yield b"data: [DONE]\n\n"

    stream = EventStream(events(), 60)
    settings, state = HttpSettings(), ServerState()
    config = uvicorn.Config(stream, http=HttpProtocol, lifespan="off", log_config=None, access_log=False)
    config.load()
    full = FullServer(config.loaded_app, settings)
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    protocol = HttpProtocol(config, state, {}, settings, full, AddressCounts(settings.max_connections, ()))
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, ours)
    await loop.sock_sendall(theirs, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    try:
        await began.wait()
        return await run(theirs, stream, transport)
    finally:
        ends.set()
        theirs.close()
        await asyncio.gather(*state.tasks)


def text_of(body: bytes) -> str:
    """The text that the chunks of a completion add up to."""
    events = [one.removeprefix(b"data: ") for one in body.split(b"\n\n") if one.startswith(b"data: {")]
    return "".join(json.loads(one)["choices"][0]["text"] for one in events)
