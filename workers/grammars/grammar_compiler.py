"""Manage the process that compiles grammars, from the worker process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from jobs.protocol.output_format import OutputFormat
from workers.engine.messages.core import SetVocabulary
from workers.engine.messages.transport import frame, read_frame
from workers.engine.process import child_environment
from workers.grammars.messages import THREADS, Compile, Compiled
from workers.text.errors import CompilerEndedError, FormatError, GrammarCompilerError

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Seconds of a processor that one grammar may take to compile."""

_WATCH_SECONDS = 60.0
"""Seconds after which a process that has not used the processor hangs."""

_START_SECONDS = 30.0


class GrammarCompiler:
    """Compile grammars in a separate process.

    The process starts with the first grammar and is replaced after a grammar has ended it. Use it
    from one event loop, whose thread must outlive it: the process ends with that thread.
    """

    def __init__(self, tokens: Callable[[], Awaitable[list[bytes]]], seconds: float = SECONDS) -> None:
        """`tokens` returns the bytes of each token of the vocabulary; it may raise FormatError."""
        self._tokens = tokens
        self._seconds = seconds
        self._numbers = itertools.count(1)
        self._process: _CompilerProcess | None = None
        self._starting = asyncio.Lock()
        self._replacing: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(THREADS)
        self._isolating = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Return the process id, or None without a process."""
        return None if self._process is None or self._process.ended else self._process.pid

    async def compile(self, wanted: OutputFormat) -> str:
        """Return the grammar of a form.

        Raises FormatError, also if compiling takes too long or ends the process, and
        GrammarCompilerError. Grammars in progress when the process ended are compiled once more,
        one at a time.
        """
        async with self._turns:
            try:
                return await self._try(wanted)
            except CompilerEndedError as error:
                logger.warning("%s; compiling its unfinished grammars again", error)
        async with self._alone():
            try:
                return await self._try(wanted)
            except CompilerEndedError as error:
                logger.warning("%s", error)
                self._replace()
        raise FormatError("It needs too much memory, or is too deeply nested, to compile; make it smaller.")

    async def close(self) -> None:
        """End the process."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        if self._process is not None:
            await self._process.end()

    async def _try(self, wanted: OutputFormat) -> str:
        process = await self._started()
        compiled = await process.compile(next(self._numbers), wanted)
        if compiled.unfinished:
            logger.warning("killing the grammar compiler: a grammar takes longer than %g s", self._seconds)
            await process.end()
            self._replace()
        if compiled.error:
            raise FormatError(compiled.error)
        return compiled.grammar

    async def _started(self) -> _CompilerProcess:
        async with self._starting:
            if self._process is None or self._process.ended:
                tokens = await self._tokens()
                self._process = _CompilerProcess(self._seconds)
                await self._process.start(tokens)
            return self._process

    def _replace(self) -> None:
        """Start the next process early, since a start takes a second for many tokens."""

        async def start() -> None:
            with suppress(GrammarCompilerError):  # reported by the next grammar
                await self._started()

        self._replacing = asyncio.create_task(start(), name="grammars")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the compiler while nothing else compiles."""
        async with self._isolating, AsyncExitStack() as turns:
            for _ in range(THREADS):
                await turns.enter_async_context(self._turns)
            yield


class _CompilerProcess:
    """One compiler process, from its start to its end."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: of a processor, for one grammar."""
        self.ended = False
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[Compiled]] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return its process id, or None before its start."""
        return None if self._process is None else self._process.pid

    async def start(self, tokens: list[bytes]) -> None:
        """Start it; return once it compiles. Raises GrammarCompilerError."""
        try:
            ours = self._launch()
        except OSError as error:
            self.ended = True
            raise GrammarCompilerError(f"the grammar compiler cannot be started: {error}") from error
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._reading = asyncio.create_task(self._read(reader), name="grammars")
            async with asyncio.timeout(_START_SECONDS):
                await self._answer_to(Compiled().number, SetVocabulary(tokens))
        except BaseException as error:
            await self.end()
            if isinstance(error, CompilerEndedError):
                raise GrammarCompilerError(f"{error} when it started") from error
            if isinstance(error, TimeoutError):
                reason = f"the grammar compiler was not ready after {_START_SECONDS:g} s"
                raise GrammarCompilerError(reason) from None
            raise

    async def compile(self, number: int, wanted: OutputFormat) -> Compiled:
        """Return its reply for a form. Raises CompilerEndedError, also if it hangs."""
        answer = asyncio.ensure_future(self._answer_to(number, Compile(number, wanted)))
        try:
            used = self._processor_seconds()
            while not (await asyncio.wait({answer}, timeout=_WATCH_SECONDS))[0]:
                before, used = used, self._processor_seconds()
                if used == before:
                    logger.warning("killing the grammar compiler: it hangs")
                    await self.end()
            return await answer
        finally:
            answer.cancel()

    def _processor_seconds(self) -> float:
        """Return the processor time that it has used; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> None:
        """Kill it; return once it has exited."""
        self.ended = True
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _answer_to(self, number: int, message: msgspec.Struct) -> Compiled:
        if self.ended:
            raise CompilerEndedError("the grammar compiler has ended")
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame(message))
        try:
            return await self._waiting[number]
        finally:
            self._waiting.pop(number, None)

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = ["-P", "-m", "workers.grammars.compiler_process", "--fd", str(theirs.fileno())]
        command += ["--seconds", str(self._seconds)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *command, "--parent", str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # the library prints an error for a caller's bad grammar
                    env=child_environment(),
                )
        except BaseException:
            ours.close()
            raise
        return ours

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Complete the waiting calls with its replies, until its end."""
        while (message := await read_frame(reader, _DECODER)) is not None:
            future = self._waiting.get(message.number)
            if future is not None and not future.done():
                future.set_result(message)
        self.ended = True
        self._writer.close()
        assert self._process is not None
        self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(CompilerEndedError(f"the grammar compiler {how}"))


_DECODER = msgspec.msgpack.Decoder(Compiled)
