"""The connections that an API process accepts."""

import os
import socket
import threading
import time
from contextlib import closing
from email.utils import parsedate_to_datetime

import pytest
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from api.http.listening import ConnectionCounts, SharedListener, inherited, listen
from api.http.server import HttpServer
from api.settings import ApiSettings
from tests.support.raw_http import connected, get
from tests.support.waiting import wait_until


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
    else:
        await PlainTextResponse("here")(scope, receive, send)


def test_what_is_written_goes_out_at_once() -> None:
    """With Nagle's algorithm on, an answer of two writes waits for the client's delayed
    acknowledgement, about 40 ms. On the socket of another process too.
    """
    with listen("127.0.0.1", 0) as listener, socket.socket(fileno=os.dup(listener.fileno())) as handed_on:
        server = HttpServer(app, ApiSettings(), 2)
        assert server.config.get_loop_factory() is uvloop.new_event_loop
        thread = threading.Thread(target=server.run, kwargs={"sockets": [handed_on]})
        thread.start()
        try:
            with connected(f"http://127.0.0.1:{listener.getsockname()[1]}") as connection:
                assert get(connection).status == 200
                [one] = server.server_state.connections
                accepted = one.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        finally:
            server.should_exit = True
            thread.join(60)


def test_the_date_is_that_of_the_answer() -> None:
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(app, ApiSettings(), 2)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with connected(f"http://127.0.0.1:{listener.getsockname()[1]}") as connection:
                for _ in range(2):
                    began = int(time.time())
                    wait_until(lambda: int(time.time()) > began, 60, "the next second")  # noqa: B023
                    headers = get(connection).headers
                    assert began < parsedate_to_datetime(headers["date"]).timestamp() <= time.time()
                    assert headers["server"] == "uvicorn"
        finally:
            server.should_exit = True
            thread.join(60)
        assert not thread.is_alive()


def test_the_process_with_the_fewest_connections_accepts_the_next() -> None:
    with listen("127.0.0.1", 0) as listener, closing(SharedListener(listener, 3)) as shared:
        counts = [ConnectionCounts(shared.descriptors[1], 3, number) for number in range(3)]
        for one, connections in zip(counts[:2], (2, 1), strict=True):
            one.publish(connections)
        assert [one.may_accept() for one in counts] == [False, True, False]
        shared.leave(1)  # it died
        assert [one.may_accept() for one in counts] == [True, False, False]
        counts[1].publish(0)  # its successor
        counts[2].publish(0)
        assert [one.may_accept() for one in counts] == [False, True, True]


def test_a_process_listens_on_what_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inherited() is None
    with listen("127.0.0.1", 0) as listener, closing(SharedListener(listener, 2)) as shared:
        for name, value in shared.environment(1).items():
            *descriptors, own = map(int, value.split(","))
            monkeypatch.setenv(name, ",".join(map(str, [*map(os.dup, descriptors), own])))
        given = inherited()
        assert given is not None
        with given[0] as handed_on:
            assert handed_on.getsockname() == listener.getsockname()
        other = ConnectionCounts(shared.descriptors[1], 2, 0)
        other.publish(1)
        given[1].publish(2)
        assert (other.may_accept(), given[1].may_accept()) == (True, False)


def test_a_supervisor_that_closes_keeps_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedListener(listen("127.0.0.1", 0), 2)
    shared.close()
    shared.close()
    shared.leave(1)  # a process that ends after that
    del shared  # with the memory that is mapped
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_connection_waits_for_a_busy_process_only_a_moment() -> None:
    """The other process has none, and accepts none: it may be busy, or about to be found dead."""
    with listen("127.0.0.1", 0) as listener, closing(SharedListener(listener, 2)) as shared:
        counts = [ConnectionCounts(shared.descriptors[1], 2, number) for number in range(2)]
        counts[0].publish(0)
        server = HttpServer(app, ApiSettings(), 2, counts[1])
        with socket.socket(fileno=os.dup(listener.fileno())) as handed_on:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [handed_on]})
            thread.start()
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                with connected(url) as first, connected(url) as second:
                    assert {get(one).status for one in (first, second)} == {200}
                    wait_until(lambda: len(server.server_state.connections) == 2, 60, "both")
            finally:
                server.should_exit = True
                thread.join(60)
        assert counts[0].may_accept()  # a process that stopped has left
