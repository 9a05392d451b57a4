"""uvicorn's server with the limits of the settings, on sockets that processes may share."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Coroutine
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from api.http import tls
from api.http.http_protocol import AddressCounts, FullServer, HttpProtocol
from api.http.listening import ConnectionCounts
from api.http_settings import HttpSettings
from jobs.process import raise_open_files

_OTHER_FILES = 128  # open files of a process besides its connections
_REFUSED_AT_ONCE = 64  # connections beyond the limit that get an answer
_WAITS = 5
_WAIT_SECONDS = 0.001
_PAUSE_SECONDS = 1.0  # before another descriptor may be free

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which here never polls, and accepts connections one by one.

    asyncio's accepts all waiting connections, so that the first of several processes would get
    them.
    """

    def __init__(
        self, app: ASGIApp, settings: HttpSettings, stop_seconds: int, counts: ConnectionCounts | None = None
    ) -> None:
        """Raise `SettingsError` for unusable TLS files."""
        config = uvicorn.Config(
            app,
            loop="auto",  # uvloop if it is installed
            http=HttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_keep_alive=settings.timeout_keep_alive,
            timeout_graceful_shutdown=stop_seconds,
        )
        self._stop_order = _StopOrder()
        super().__init__(config)
        self.server_state = _DatedState(config)
        config.load()
        config.ssl = tls.server_context(settings)
        self._settings = replace(settings, max_connections=_most_connections(settings))
        self._full = FullServer(config.loaded_app, self._settings)
        trusted = getattr(config.loaded_app, "trusted_hosts", ())  # of uvicorn's ProxyHeadersMiddleware
        self._addresses = AddressCounts(self._settings.max_connections, trusted)
        self._counts = counts
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = 0

    @property
    def should_exit(self) -> bool:
        """Return whether the server is to end; signal handlers and other threads may set it."""
        return self._stop_order.is_given

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._stop_order.give()

    async def main_loop(self) -> None:
        """Wait for the order to stop; uvicorn's own loop polls ten times a second."""
        await self._stop_order.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept from `sockets`."""
        await super().startup(sockets=[])  # this starts the app alone
        for listener in sockets or [] if self.started else []:
            listener.setblocking(False)
            self._start(self._accept(listener))
        if self._settings.enable_ssl_refresh and self.config.ssl is not None:
            self._start(tls.refresh(self._settings, self._use))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end the running calls."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._counts is not None:
            self._counts.leave()
        if self.server_state.connections or self.server_state.tasks or self.force_exit:
            await super().shutdown(sockets)
        else:  # without uvicorn's pause for connections to close
            await self._end_app(sockets or [])

    async def _end_app(self, sockets: list[socket.socket]) -> None:
        for listener in sockets:
            listener.close()
        await self.lifespan.shutdown()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        self._publish()
        while True:
            await _readable(listener)
            await self._give_way()
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue  # another process has it, or its client left
            except OSError as error:
                logger.error("cannot accept connections, trying again in %g s: %s", _PAUSE_SECONDS, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            address = peer[0] if isinstance(peer, tuple) else ""
            self._addresses.enter(address)
            if self._is_beyond(address):
                self._addresses.leave(address)
                connection.close()  # otherwise silent connections would use up the file descriptors
                continue
            connection.setblocking(False)
            self._connecting += 1
            self._publish()
            self._start(self._connect(connection, address))

    def _is_beyond(self, address: str) -> bool:
        """Return whether a connection gets no answer either."""
        most = self._settings.max_connections + _REFUSED_AT_ONCE
        return self._connections >= most or self._addresses.are_many(address, _REFUSED_AT_ONCE)

    async def _give_way(self) -> None:
        """Leave a connection for a moment to a process with fewer, which may be busy."""
        if self._counts is None:
            return
        self._publish()
        for _ in range(_WAITS):
            if self._counts.may_accept():
                return
            await asyncio.sleep(_WAIT_SECONDS)

    async def _connect(self, connection: socket.socket, address: str) -> None:
        """Set up TLS, if any, and the protocol, which counts the address until it is lost."""
        context = self.config.ssl
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._settings.timeout_head,
            )
        except OSError as error:  # a client that left, or does not speak TLS
            logger.debug("a connection could not be set up: %s", error)
            self._addresses.leave(address)
            connection.close()
        except asyncio.CancelledError:
            self._addresses.leave(address)
            connection.close()
            raise
        finally:
            self._connecting -= 1

    def _use(self, context: ssl.SSLContext | None) -> None:
        self.config.ssl = context

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(
            self.config, self.server_state, self.lifespan.state, self._settings, self._full, self._addresses
        )

    @property
    def _connections(self) -> int:
        return len(self.server_state.connections) + self._connecting

    def _publish(self) -> None:
        if self._counts is not None:
            self._counts.publish(self._connections)


class _StopOrder:
    """An order to stop, given by a signal handler or another thread, even before the loop runs."""

    def __init__(self) -> None:
        self.is_given = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came = asyncio.Event()

    def give(self) -> None:
        self.is_given = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._came.set)

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.is_given:
            await self._came.wait()


class _DatedState(ServerState):
    """uvicorn's state, whose Date header is made on demand, at most once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._config = config
        self._second = 0
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the first headers of each answer."""
        if (second := int(time.time())) != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode()), *self._config.encoded_headers]
        return self._headers

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        self._headers = value


def _most_connections(settings: HttpSettings) -> int:
    """Raise the limit of open files as far as allowed; return the connections that it leaves."""
    files = raise_open_files()
    left = files - _OTHER_FILES - _REFUSED_AT_ONCE
    return settings.max_connections if files < 0 else max(1, min(settings.max_connections, left))


async def _readable(listener: socket.socket) -> None:
    """Wait until a client connects."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
