"""A worker's front process: requests come from Redis, go through the engine core in its own process, and return as tokens and results.

`main(settings)` runs one until it is told to stop. What it answers for stands in Redis at any moment, so it may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import redis

from jobs.connection import ServerError, check_server, connect
from jobs.queue import Queue, QueueUnavailable
from jobs.registry import WorkerRecord, WorkerState
from jobs.requests import Finished
from jobs.server import die_with_parent
from jobs.streams import ControlMessage
from workers import statistics
from workers.claims import Intake
from workers.control import Control
from workers.engine.async_engine import AsyncEngine, EngineDeadError, EngineStartError
from workers.leases import Held, Leases
from workers.outbox import Outbox
from workers.preparation import Limits, Preparation
from workers.requests_in_flight import Prepared
from workers.running import Running
from workers.settings import WorkerSettings
from workers.text.errors import TokenizerError
from workers.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

MAX_ENGINE_RESTARTS = 3
CALL_RETRY_SECONDS = 2.0
"""How long one call to Redis tries again by itself; who calls decides what happens then."""

GOODBYE_SECONDS = 5.0
"""How long a stopping worker waits for Redis to take its last results."""

T = TypeVar("T")


class WorkerError(Exception):
    """The worker cannot start or go on; one sentence that says why."""


def main(settings: WorkerSettings) -> int:
    """Runs a worker to its end; returns the exit code: 0 when it was told to stop, 1 when it could not go on, 2 when it could not start."""
    if settings.parent is not None:
        die_with_parent(settings.parent)
    worker = Worker(settings)
    try:
        asyncio.run(worker.run())
    except WorkerError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1 if worker.was_ready else 2
    return 0


class Worker:
    """One model replica."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.was_ready = False
        self._queue = Queue(connect(settings.redis_url), settings.queue.model_copy(update={"redis_retry_seconds": CALL_RETRY_SECONDS}))
        self._engine: AsyncEngine | None = None
        self._stop_orders = 0

    async def run(self) -> None:
        """Serves until told to stop (SIGTERM, SIGINT or an order through Redis). Raises WorkerError."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._leases = Leases(self._queue, self.id, self.settings.queue.lease_seconds, self._from_thread(self._on_lost))
        self._control = Control(self._queue, self.id, self._from_thread(self._on_orders))
        interval = self.settings.queue.stream_interval
        self._outbox = Outbox(self._queue, self.id, interval, lambda: self._running.due(), self._leases.drop, self._on_lost)
        self._running = Running(self._outbox, self._loop.time, interval)
        self._intake: Intake | None = None
        try:
            await self._start()
            if not self._stopping.is_set():
                await self._serve()
            await self._drain()
        finally:
            await self._end()

    async def _start(self) -> None:
        """Registers, and loads tokenizer and engine side by side."""
        started = time.monotonic()
        await self._register()
        self._leases.start()
        self._control.start()
        loading = asyncio.create_task(self._load_engine())
        tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({tokenizer, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if tokenizer.done():
                await tokenizer
                await self._set_state("initializing")
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                return
            await loading
        finally:
            loading.cancel()
            stopping.cancel()
        self._make_intake(tokenizer.result())
        self.was_ready = True
        await self._set_ready()
        logger.info("ready after %.1f s as %s: %s", time.monotonic() - started, self.id, ", ".join(self.settings.models))

    def _load_tokenizer(self) -> TextTokenizer:
        try:
            return TextTokenizer.load(self.settings.tokenizer, self.settings.chat_template)
        except TokenizerError as error:
            raise WorkerError(str(error)) from error

    async def _load_engine(self) -> None:
        engine = AsyncEngine(self.settings.engine)
        try:
            await engine.start(self.settings.start_timeout)
        except EngineStartError as error:
            raise WorkerError(str(error)) from error
        self._engine = self._running.engine = engine
        self._running.eos_token_ids = list(engine.info.eos_token_ids)
        info = engine.info
        logger.info(
            "engine on %s (%s): %d requests at once, context of %d tokens, cache of %d blocks of %d; weights read in %.1f s",
            *(info.device, info.dtype, info.max_num_seqs, info.max_model_len, info.num_blocks, info.block_size, info.weights_seconds),
        )

    def _make_intake(self, tokenizer: TextTokenizer) -> None:
        assert self._engine is not None
        info = self._engine.info
        preparation = Preparation(tokenizer, self.settings.models, Limits(info.max_model_len, info.vocab_size))
        models, in_flight = self.settings.models, self._running.__len__
        self._intake = Intake(
            self._queue, self.id, models, info.max_num_seqs, self._leases, preparation, in_flight, self._start_requests
        )  # fmt: skip

    async def _serve(self) -> None:
        """Runs until told to stop, through up to MAX_ENGINE_RESTARTS deaths of the engine core. Raises WorkerError."""
        assert self._engine is not None
        assert self._intake is not None
        helpers = [
            asyncio.create_task(self._intake.run(), name="intake"),
            asyncio.create_task(self._outbox.run(lambda: len(self._running) > 0), name="outbox"),
            asyncio.create_task(statistics.report(self._running, lambda: self._engine, self._engine.info.num_blocks), name="statistics"),
            asyncio.create_task(self._run_engines(), name="engine"),
        ]
        self._helpers = helpers
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping, *helpers], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for helper in helpers:
            if helper.done():
                helper.result()

    async def _run_engines(self) -> None:
        """Takes the steps of one engine core after the other."""
        assert self._intake is not None
        for restarts in range(MAX_ENGINE_RESTARTS + 1):
            assert self._engine is not None
            try:
                async for output in self._engine.steps():
                    self._running.on_step(output)
                    if any(output.finish):
                        self._intake.room_made()
                return
            except EngineDeadError as error:
                await self._bury_engine(error)
                if self._stopping.is_set():
                    return
                if restarts == MAX_ENGINE_RESTARTS:
                    raise WorkerError(f"{error}; that was the end of {restarts + 1} engine cores, no more are started") from error
            await self._set_state("loading")
            await self._load_engine()
            await self._set_ready()
            self._intake.resume()

    async def _bury_engine(self, error: EngineDeadError) -> None:
        """Gives everything up that the dead core had, at once: what was generated is published first and goes on elsewhere, or here."""
        logger.error("%s; %d requests were with it", error, len(self._running))
        assert self._intake is not None
        await self._intake.pause()
        deltas = self._running.checkpoint()
        self._running.engine_lost()
        self._engine = None
        await self._outbox.deliver(deltas)
        self._leases.drop(self._leases.all())
        await self._call(lambda: self._queue.reap(self.id))

    def _start_requests(self, prepared: list[Prepared], errors: list[Finished]) -> None:
        self._running.start(prepared)
        self._running.reject(errors)
        self._outbox.requests_run()

    async def _drain(self) -> None:
        """Stops in order: nothing new, what has not begun goes back at once, the rest when its time is over, with what it has so far."""
        await self._set_state("draining")
        if self._intake is None:
            return
        await self._intake.pause()
        await self._give_back(self._running.drop_unstarted())
        deadline = self._loop.time() + self.settings.shutdown_timeout
        logger.info("draining: %d requests have %.0f s to finish", len(self._running), self.settings.shutdown_timeout)
        while len(self._running) and self._engine is not None and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        deltas = self._running.checkpoint()
        held = self._running.drop_all()
        try:
            await asyncio.wait_for(self._outbox.deliver(deltas), GOODBYE_SECONDS)
        except TimeoutError:
            logger.warning("Redis is away: the last results are lost, and their requests will run again")
        await self._give_back(held)
        logger.info("stopped; %d requests were handed back with what they had", len(held))

    async def _give_back(self, held: list[Held]) -> None:
        if held:
            await self._call(lambda: self._queue.hand_back(self.id, held))
            self._leases.drop(held)

    async def _end(self) -> None:
        """Leaves nothing running and nothing registered."""
        for helper in getattr(self, "_helpers", []):
            helper.cancel()
        self._leases.stop()
        self._control.stop()
        self._outbox.close()
        if self._intake is not None:
            self._intake.close()
        if self._engine is not None:
            await self._engine.stop()
        await self._call(lambda: self._queue.remove_worker(self.id))

    def _on_signal(self, number: signal.Signals) -> None:
        self._stop_orders += 1
        if self._stop_orders > 1:
            logger.warning("%s again: stopping at once", number.name)
            os._exit(128 + number)
        logger.info("%s: stopping", number.name)
        self._stopping.set()

    def _on_orders(self, orders: list[ControlMessage]) -> None:
        for order in orders:
            if order.kind == "bell" and self._intake is not None:
                self._intake.bell()
            elif order.kind == "cancel":
                self._leases.drop(self._running.cancel(order))
            elif order.kind == "watch":
                self._running.watch(order)
            elif order.kind == "drain":
                self._stopping.set()

    def _on_lost(self, held: list[Held]) -> None:
        running = self._running.lose(held)
        self._leases.drop(held)
        if running:
            logger.warning("%d requests were taken away: their leases ran out or they were cancelled", running)

    def _from_thread(self, action: Callable[[T], None]) -> Callable[[T], None]:
        """The same action, called from another thread, runs in the event loop."""

        def call(value: T) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(action, value)

        return call

    async def _register(self) -> None:
        self._record = WorkerRecord(self.id, self.settings.models, "loading", 0, time.time(), socket.gethostname(), os.getpid())
        try:
            await asyncio.to_thread(check_server, self._queue.redis)
            await asyncio.to_thread(self._queue.register_worker, self._record)
        except ServerError as error:
            raise WorkerError(str(error)) from error
        except (redis.RedisError, QueueUnavailable) as error:
            raise WorkerError(f"Redis at {self.settings.redis_url} cannot be used: {error}") from error

    async def _set_ready(self) -> None:
        assert self._engine is not None
        longest = self._engine.info.max_model_len
        self._record = msgspec.structs.replace(self._record, state="ready", max_model_len=longest)
        await self._call(lambda: self._queue.register_worker(self._record))

    async def _set_state(self, state: WorkerState) -> None:
        await self._call(lambda: self._queue.set_worker_state(self.id, state))

    async def _call(self, action: Callable[[], object]) -> None:
        """A call to Redis that is not worth failing for: leases run out by themselves, and records too."""
        try:
            await asyncio.to_thread(action)
        except QueueUnavailable as error:
            logger.warning("Redis did not hear of it: %s", error)
