"""Drive the engine from the worker process: start the core, send requests, deliver steps."""

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from workers.engine.client.engine_metrics import EngineMetrics
from workers.engine.client.launch import LaunchedCore, launch_core
from workers.engine.client.watchdog import WatchdogTimeout
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import (
    AbortRequests,
    AddRequests,
    EngineRequest,
    Failed,
    FromCore,
    Ready,
    SetVocabulary,
    Shutdown,
    Stats,
    StepOutput,
    ToCore,
)
from workers.engine.messages.errors import EngineError
from workers.engine.messages.transport import frame, read_frame

logger = logging.getLogger(__name__)

_STDERR_LINES = 5
_LAST_WORDS = 600  # characters
_DEATH_GRACE = 0.3  # seconds from the exit of the process to the end of its output
# Time to read the output of an exited process; a child process may keep its output open
_LAST_OUTPUT_SECONDS = 2.0
# Seconds from the closed socket to the exit of the process, which may have to release a device
_EXIT_GRACE = 5.0
_GONE_LOOK = 10.0  # seconds between log lines about a killed process that does not end
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))
_READ_BUFFER = 1 << 20
# Consecutive checks that must all find a hung core; a single one may only mean that this process
# was delayed
_CHECKS = 4
_MAX_CHECK_INTERVAL = 1.0  # seconds


class EngineStartError(EngineError):
    """The core could not be started; the message is one sentence with the cause.

    `returncode` is negative if a signal ended it.
    """

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class EngineDeadError(EngineError):
    """The core has ended.

    `returncode` is its exit status, negative for a signal, or None if this process had to kill it.

    `by_itself` means that its requests may have caused the end, by an error, a crash or a hang; an
    end from outside is excluded. `reason` is the message without the core's last output.
    """

    def __init__(self, message: str, returncode: int | None, *, by_itself: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.returncode = returncode
        self.by_itself = by_itself
        self.reason = reason or message


class AsyncEngine:
    """Run one engine core and exchange messages with it.

    Use it from one event loop, which must run in a thread that outlives the engine: the core dies
    with that thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        watchdog_timeout: WatchdogTimeout | None = None,
        launched: LaunchedCore | None = None,
        vocabulary: Callable[[], list[bytes]] | None = None,
    ) -> None:
        """Take the timeout that earlier cores recorded, and a core that is launched already.

        `vocabulary` returns each token's bytes, as `SetVocabulary` has them. It is called, once,
        when the first request with a guide is added, which without it the core refuses.
        """
        self.config = config
        self._vocabulary = vocabulary
        self.watchdog_timeout = watchdog_timeout or WatchdogTimeout(config.step_timeout)
        self._launched = launched
        self.stats = Stats()
        self.metrics = EngineMetrics()
        self._info: Ready | None = None
        self._core: _CoreProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._death: EngineDeadError | None = None
        self._stopping = False
        self._unfinished = 0
        self._requested = asyncio.Event()
        self._received = False
        self._hung = ""  # how long it sent nothing, in words
        self._outputs: deque[StepOutput] = deque()
        self._wake = asyncio.Event()

    @property
    def info(self) -> Ready:
        """Return the core's description from when it became ready."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def pid(self) -> int:
        """Return the core's process id."""
        if self._core is None:
            raise RuntimeError("the engine has not been started")
        return self._core.pid

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the core's process (as far as Linux reports it)."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"

    async def start(self, timeout: float = 600.0) -> None:
        """Start the core and wait until it has loaded the model.

        Raises EngineStartError, and leaves no process behind, if that fails.
        """
        try:
            launched, self._launched = self._launched or launch_core(self.config), None
        except OSError as error:
            raise EngineStartError(f"the engine core cannot be started: {error}") from error
        launched.taken = True
        self.config, ours = launched.config, launched.connection
        core = self._core = _CoreProcess(launched.process, asyncio.get_running_loop())
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=_READ_BUFFER)
            self._info = await self._await_ready(reader, core, timeout)
        except BaseException:
            core.kill()
            if self._writer is not None:
                self._writer.transport.abort()
                self._writer = None
            ours.close()
            raise
        self._watchdog = asyncio.create_task(self._watch_steps(core), name="engine-watchdog")
        self._tasks = [asyncio.create_task(self._watch(reader, core), name="engine-watch")]

    def add(self, requests: list[EngineRequest]) -> None:
        """Send requests to the core. Raises EngineDeadError if the core has ended."""
        if self._vocabulary is not None and any(request.guide is not None for request in requests):
            self._send(SetVocabulary(self._vocabulary()))
            self._vocabulary = None
        self._send(AddRequests(requests))
        self._unfinished += len(requests)
        self._requested.set()

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests in any state.

        Each appears once more in a step, with Finish.ABORT, unless it has already ended.
        """
        self._send(AbortRequests(list(request_ids)))

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Yield every step in which a request got a token or ended. For one consumer.

        Ends after `stop`. Raises EngineDeadError when the core has died and all its steps have been
        yielded.
        """
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self._death is not None:
                if self._stopping:
                    return
                raise self._death
            self._wake.clear()
            await self._wake.wait()

    async def stop(self, timeout: float = 10.0) -> None:
        """Let the core finish its step and exit; kill it after `timeout` seconds.

        Returns once the process is gone and its device is free.
        """
        if self._launched is not None:
            self._launched.discard()
            self._launched = None
        core = self._core
        if core is None:
            return
        self._stopping = True
        if self._death is None and self._writer is not None:
            self._writer.write(frame(Shutdown()))
        if not await core.wait_ended(timeout):
            core.kill()
        await asyncio.gather(*self._tasks)
        while not await core.wait_ended(_GONE_LOOK):
            logger.error("the engine core (process %d) was killed and does not end; waiting for it", core.pid)

    async def _await_ready(self, reader: asyncio.StreamReader, core: "_CoreProcess", timeout: float) -> Ready:
        first = asyncio.create_task(_read(reader))
        ended = asyncio.create_task(core.ended.wait())
        try:
            await asyncio.wait({first, ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or (first.done() and first.result() is None):
                # The other signal of the end, or a message from before it
                await asyncio.wait({first, ended}, timeout=_DEATH_GRACE if ended.done() else _EXIT_GRACE)
            message = first.result() if first.done() else None
        finally:
            first.cancel()
            ended.cancel()
        if isinstance(message, Ready):
            return message
        if isinstance(message, Failed):
            raise EngineStartError(message.message)
        how = core.how_it_ended() if ended.done() or first.done() else f"was not ready after {timeout:g} s"
        if core.returncode == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
        raise EngineStartError(
            f"the engine core {how} while loading {self.config.model}{core.last_words()}", core.returncode
        )

    def _send(self, message: ToCore) -> None:
        if self._death is not None:
            raise self._death
        if self._writer is None:
            raise RuntimeError("the engine has not been started")
        self._writer.write(frame(message))

    async def _watch(self, reader: asyncio.StreamReader, core: "_CoreProcess") -> None:
        """Deliver the core's messages until it dies, then the error with the cause."""
        last: list[str] = []
        receiving = asyncio.create_task(self._receive(reader, last))
        ended = asyncio.create_task(core.ended.wait())
        await asyncio.wait({receiving, ended, self._watchdog}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({receiving, ended}, timeout=_DEATH_GRACE if ended.done() or self._hung else _EXIT_GRACE)
        death = self._death_of(core, last)
        core.kill()
        for task in (receiving, ended, self._watchdog):
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        self._death = death
        self._wake.set()

    def _death_of(self, core: "_CoreProcess", last: list[str]) -> EngineDeadError:
        """Return the error for the end of the core.

        `last` is the error that the core reported as the reason, if it could.
        """
        returncode = None if self._hung else core.returncode
        how, by_itself = core.how_it_ended(), returncode is not None and (returncode >= 0 or -returncode in _CRASHES)
        if self._stopping:
            how, by_itself = "was stopped", False
        elif self._hung:
            how, by_itself = f"was killed because its step hung: nothing came in {self._hung}", True
        elif last:
            how, by_itself = f"{how}: {last[0]}", True
        reason = f"the engine core {how}"
        return EngineDeadError(
            reason if last else reason + core.last_words(), returncode, by_itself=by_itself, reason=reason
        )

    async def _watch_steps(self, core: "_CoreProcess") -> None:
        """Kill a core that has requests and sends nothing for longer than the watchdog timeout.

        `_watch` handles its end.
        """
        quiet = 0.0
        while quiet < self.watchdog_timeout.seconds:
            if not self._unfinished:
                self._requested.clear()
                await self._requested.wait()
            interval = min(self.watchdog_timeout.seconds / _CHECKS, _MAX_CHECK_INTERVAL)
            await asyncio.sleep(interval)
            quiet = quiet + interval if self._unfinished and not self._received else 0.0
            self._received = False
        self._hung = f"{self.watchdog_timeout.seconds:g} s"
        core.kill()

    async def _receive(self, reader: asyncio.StreamReader, last: list[str]) -> None:
        while (message := await _read(reader)) is not None:
            if isinstance(message, StepOutput):
                self._hand_out(message)
            elif isinstance(message, Failed):
                last.append(message.message)

    def _hand_out(self, output: StepOutput) -> None:
        self.stats = output.stats
        self.metrics.record(output.stats)
        self.watchdog_timeout.record(output.stats.full_step_seconds)
        self._received = True
        self._unfinished -= sum(map(bool, output.finish))
        if output.request_ids:
            self._outputs.append(output)
            self._wake.set()


class _CoreProcess:
    """The child process and two threads, which wait for its stderr and its exit."""

    def __init__(self, process: "subprocess.Popen[str]", loop: asyncio.AbstractEventLoop) -> None:
        self.ended = asyncio.Event()
        self._loop = loop
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._process = process
        self._reading = threading.Thread(target=self._read_stderr, name="engine-stderr", daemon=True)
        self._reading.start()
        threading.Thread(target=self._wait, name="engine-wait", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait_ended(self, timeout: float) -> bool:
        """Return whether the process has ended after at most `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def how_it_ended(self) -> str:
        code = self.returncode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def last_words(self) -> str:
        """Return the end of its stderr, as the end of a sentence."""
        deadline = time.monotonic() + _LAST_OUTPUT_SECONDS
        while self.ended.is_set() and self._reading.is_alive() and time.monotonic() < deadline:
            self._reading.join(0.01)
        words = " | ".join(line.strip() for line in list(self._lines) if line.strip())
        return f"; its last output: {words[-_LAST_WORDS:]}" if words else ""

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line)
                with suppress(OSError):  # its reader may be gone; a full pipe would block the core
                    sys.stderr.write(line)

    def _wait(self) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop may already be closed
            self._loop.call_soon_threadsafe(self.ended.set)


_DECODER: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


async def _read(reader: asyncio.StreamReader) -> FromCore | None:
    message: FromCore | None = await read_frame(reader, _DECODER)
    return message
