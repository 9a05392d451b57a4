"""Run a worker process: requests come from Redis, go through the engine core in its own process,
and return as tokens and results.

`main(settings)` runs one until it is ordered to stop. Redis always stores everything that the
worker is responsible for, so it may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import redis

from jobs.queue.connection import check_server, connect
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.server import ServerError
from jobs.tracing import start_tracing
from workers.engine.client.async_engine import EngineDeadError, EngineStartError
from workers.engine.client.launch import LaunchedCore
from workers.engine.client.watchdog import WatchdogTimeout
from workers.engine.messages.errors import DETAILS_HINT
from workers.errors import WorkerError
from workers.grammars.grammar_compiler import GrammarCompiler
from workers.load_failure import note_load_failure
from workers.replica.duplicates import Digest
from workers.replica.grammars import Grammars
from workers.replica.replica import Replica
from workers.settings import WorkerSettings
from workers.text.errors import TextError, is_panic
from workers.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

MAX_ENGINE_RESTARTS = 5
"""Most consecutive deaths of cores that answered no request; a worker gives up after one more.
Deaths during an isolated run do not count.
"""

CALL_RETRY_SECONDS = 2.0
"""Seconds for which one call to Redis retries by itself; the caller handles the failure."""

_LONGEST_PAUSE = 32.0  # seconds

T = TypeVar("T")


def main(
    settings: WorkerSettings, launched: LaunchedCore | None = None, was_stopped: Callable[[], bool] = lambda: False
) -> int:
    """Run a worker to its end; return the exit code: 0 if it was ordered to stop, 1 if it could not
    continue or Redis was unavailable, 2 if it could not start.

    `launched` is its first core, if it was launched before all of this was imported. `was_stopped`
    returns whether an order to stop came before that.
    """
    worker = Worker(settings, launched, was_stopped)
    try:
        asyncio.run(worker.run())
    except (WorkerError, EngineStartError, TextError) as error:
        if worker.is_stopping:
            return 0
        print(f"Error: {error}", file=sys.stderr)
        if worker.was_ready or error.retry:
            return 1
        note_load_failure(settings, error)
        return error.exit_code
    except BaseException as error:
        if worker.was_ready or not (isinstance(error, Exception) or is_panic(error)):
            raise
        logger.debug("the worker cannot start", exc_info=True)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": .")
        model = settings.engine.model
        print(f"Error: the model {model} cannot be served: {reason}{DETAILS_HINT}", file=sys.stderr)
        note_load_failure(settings, reason)
        return WorkerError.exit_code
    return 0


class Worker:
    """Run the process: its tokenizer, the signals that stop it, and one engine core after
    another.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        launched: LaunchedCore | None = None,
        was_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings = settings
        self._launched = launched
        self._was_stopped = was_stopped
        self.was_ready = False
        assert settings.redis_url is not None
        self._queue = Queue(connect(settings.redis_url), replace(settings, redis_retry_seconds=CALL_RETRY_SECONDS))
        self._stop_orders = 0
        self._tracing = start_tracing(settings.otlp_traces_endpoint, "pipeline-worker")

    @property
    def is_stopping(self) -> bool:
        """Return whether an order to stop came."""
        return self._stop_orders > 0

    async def run(self) -> None:
        """Serve until ordered to stop (SIGTERM or SIGINT).

        Raise WorkerError, EngineStartError or TextError.
        """
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._was_stopped():
            self._on_signal(signal.SIGTERM)
        await self._check_redis()
        tokenizer = _in_daemon_thread(partial(TextTokenizer.load, self.settings.tokenizer, self.settings.chat_template))
        compiler = GrammarCompiler(partial(_vocabulary, tokenizer))
        grammars = Grammars(compiler)
        try:
            await self._run_replicas(tokenizer, grammars)
        finally:
            tokenizer.cancel()
            await grammars.close()
            await compiler.close()
            if self._tracing is not None:
                self._tracing.close()

    async def _run_replicas(self, tokenizer: asyncio.Future[TextTokenizer], grammars: Grammars) -> None:
        deaths, longest_at_death, pause = Deaths(), 0, 0.0
        suspects: set[Digest] = set()
        watchdog_timeout = WatchdogTimeout(self.settings.engine.step_timeout)
        while not self._stopping.is_set():
            launched, self._launched = self._launched, None
            replica = Replica(
                self.settings,
                self._queue,
                tokenizer,
                grammars,
                watchdog_timeout,
                self._stopping,
                longest_at_death,
                launched,
                self._tracing,
                suspects,
            )
            try:
                await replica.run(pause)
                return
            except (EngineDeadError, EngineStartError) as error:
                if self._stopping.is_set():
                    return
                longest_at_death = replica.longest_at_death
                if isinstance(error, EngineStartError):
                    if not self._may_start_yet(error):
                        raise
                    logger.error("failed to start an engine core; starting another: %s", error)
                pause = deaths.count(
                    isolated=replica.isolated, answered=replica.has_answered, cleared=replica.cleared_requests
                )
                if deaths.in_a_row > MAX_ENGINE_RESTARTS:
                    raise WorkerError(
                        f"{error}; {deaths.in_a_row} engine cores in a row have died; not starting another"
                    ) from error
                logger.warning("starting another engine core%s", f" in {pause:g} s" if pause else "")
            finally:
                self.was_ready = self.was_ready or replica.was_ready

    def _may_start_yet(self, error: EngineStartError) -> bool:
        """Return whether another try can help.

        A signal does not point to the model, and a worker that was ready once may lack memory for a
        moment.
        """
        return self.was_ready or (error.returncode is not None and error.returncode < 0)

    def _on_signal(self, number: signal.Signals) -> None:
        self._stop_orders += 1
        if self._stop_orders > 1:
            logger.warning("%s again: stopping at once", number.name)
            os._exit(128 + number)
        logger.info("%s: stopping", number.name)
        self._stopping.set()

    async def _check_redis(self) -> None:
        try:
            await asyncio.to_thread(check_server, self._queue.redis)
        except ServerError as error:
            raise WorkerError(str(error)) from error
        except (redis.RedisError, QueueUnavailable) as error:
            raise WorkerError(f"Redis cannot be used: {error}", retry=True) from error


async def _vocabulary(tokenizer: asyncio.Future[TextTokenizer]) -> list[bytes]:
    loaded = await asyncio.shield(tokenizer)
    return await _in_daemon_thread(loaded.vocabulary)


class Deaths:
    """Count the deaths of cores that answered nothing; wait 0, 1, 2, 4, ... seconds after each.

    Crashes during an isolated run are expected and counted apart; they never end the worker.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._isolated = 0

    def count(self, *, isolated: bool, answered: bool, cleared: bool) -> float:
        """Count a crash and return the seconds to wait.

        `answered` and `cleared`: whether that core had answered a request or released one from
        quarantine.
        """
        if answered:
            self.in_a_row = 0
        if answered or cleared:
            self._isolated = 0
        if isolated:
            self._isolated += 1
        else:
            self.in_a_row += 1
        row = self._isolated if isolated else self.in_a_row
        return 0.0 if row <= 1 else min(_LONGEST_PAUSE, 2.0 ** (row - 2))


def _in_daemon_thread(action: Callable[[], T]) -> asyncio.Future[T]:
    """Return the result of `action`, or raise its error.

    Unlike a thread of a pool, this thread does not delay the exit of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop may already be closed
            loop.call_soon_threadsafe(lambda: None if future.done() else outcome())

    def run() -> None:
        try:
            value = action()
        except BaseException as error:  # as the tokenizers library raises
            settle(partial(future.set_exception, error))
        else:
            settle(partial(future.set_result, value))

    threading.Thread(target=run, daemon=True).start()
    return future
