"""One engine core and everything that answers for what it has: intake, leases, orders, results.

Each is registered under a name of its own, because numbered claims belong to one life: after a
core's death the next one is a newcomer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from jobs.protocol.requests import Delta, Finished, RequestKey
from jobs.protocol.results import ApiError, Result, new_request_id
from jobs.queue.registry import WorkerRecord, WorkerState
from jobs.queue.request_queue import Held, Queue, QueueUnavailable
from jobs.queue.streams import ControlMessage
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError, EngineRequestError
from workers.engine.client.launch import LaunchedCore
from workers.engine.client.watchdog import WatchdogTimeout
from workers.engine.messages.core import SamplingParams
from workers.replica import statistics
from workers.replica.intake import Intake
from workers.replica.leases import Leases
from workers.replica.orders import Orders
from workers.replica.outbox import Outbox
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.quarantine import HARMLESS_TOKENS, Quarantine
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.settings import WorkerSettings
from workers.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 5.0
"""How long a stopping worker waits for Redis to take its last results and the requests that it
requeues.
"""

PACE_SECONDS = 0.5
"""How long a draining worker measures, at least, before it decides which requests cannot finish in
time.
"""

PACE_STEPS = 2
"""How many steps it sees meanwhile, at least, unless the core's process is stopped."""

_RETRY_SECONDS = 0.5
_SELF_TEST_LENGTH = 15  # tokens; fewer than a block of the KV cache, so that nothing of it stays there

T = TypeVar("T")


class Replica:
    """One engine core, the requests that the worker holds for it, and the tasks that serve them.

    It lasts from the start of the core to its end; the next core gets a new one, with an id of its
    own.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        tokenizer: asyncio.Future[TextTokenizer],
        watchdog_timeout: WatchdogTimeout,
        stopping: asyncio.Event,
        longest_at_death: int = 0,
        launched: LaunchedCore | None = None,
    ) -> None:
        """`stopping` is set when it is to end, and may be set here by an order that came through
        Redis.

        `longest_at_death`: tokens of the longest request that an earlier core of this worker had
        when it ended by itself; 0 for none. `launched`: a core that loads its model already.
        """
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.was_ready = False
        self.cleared_requests = False
        self.longest_at_death = longest_at_death
        self._settings = settings
        self._queue = queue
        self._tokenizer = tokenizer
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._record = WorkerRecord(
            self.id,
            settings.models,
            "loading",
            0,
            time.time(),
            socket.gethostname(),
            os.getpid(),
            statistics.declared_metrics(),
        )
        self._engine = AsyncEngine(settings.engine, watchdog_timeout, launched)
        self._leases = Leases(
            queue, self.id, settings.queue.lease_seconds, self._generated, self._from_thread(self._on_lost)
        )
        self._orders = Orders(queue, self.id, self._from_thread(self._on_orders))
        interval = settings.queue.stream_interval
        self._outbox = Outbox(queue, self.id, interval, self._generated, self._leases.drop, self._on_lost)
        self._running = Running(self._engine, self._outbox, self._loop.time, interval)
        self._self_test_tokens = 0
        self._intake: Intake | None = None
        self._quarantine: Quarantine | None = None

    @property
    def has_answered(self) -> bool:
        """Whether a request got its answer here."""
        return self._running.finished > self._running.failed

    @property
    def isolated(self) -> bool:
        """Whether it runs, or ran at its end, quarantined requests only."""
        return self._intake is not None and self._intake.isolated

    async def run(self, pause: float = 0.0) -> None:
        """Serve until ordered to stop; the core is started after `pause` seconds, in which the
        registry has the worker already.

        Raise WorkerError or EngineStartError when it cannot start, and EngineDeadError, everything
        requeued, after a death.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._set_state("loading")
            self._leases.start()
            self._orders.start()
            if await self._pause(pause) and await self._load():
                tasks += self._start_tasks()
                await self._until_stopped(tasks)
                await self._drain(tasks[0])
        except EngineDeadError as error:
            await self._handle_crash(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    async def _pause(self, seconds: float) -> bool:
        """False when ordered to stop meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return not self._stopping.is_set()

    async def _load(self) -> bool:
        """Tokenizer and engine, side by side; False when ordered to stop meanwhile."""
        started = time.monotonic()
        engine = asyncio.create_task(self._load_engine())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            both: tuple[asyncio.Future[Any], ...] = (engine, self._tokenizer)
            await asyncio.wait({*both, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._tokenizer.done() and not engine.done():
                self._tokenizer.result()
                await self._set_state("initializing")
            for loading in both:
                await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    return False
                loading.result()
        finally:
            stopping.cancel()
            engine.cancel()
        await self._become_ready(self._tokenizer.result())
        logger.info(
            "ready after %.1f s as %s: %s", time.monotonic() - started, self.id, ", ".join(self._settings.models)
        )
        return True

    async def _load_engine(self) -> None:
        await self._engine.start(self._settings.start_timeout)
        info = self._engine.info
        logger.info(
            "engine on %s (%s): %d requests at once, context of %d tokens, cache of %d blocks of %d; weights read in"
            " %.1f s",
            *(
                info.device,
                info.dtype,
                info.max_num_seqs,
                info.max_model_len,
                info.num_blocks,
                info.block_size,
                info.weights_seconds,
            ),
        )
        try:
            await self._run_self_test(info.max_model_len)
        except EngineRequestError as error:
            raise EngineDeadError(
                f"the engine core failed at the first request, which was the worker's own: {error}", None
            ) from error

    async def _run_self_test(self, max_model_len: int) -> None:
        """Run a request of the worker's own before any claim, so that no request is dead-lettered
        for a device that fails at everything.

        After a crash it is as long as the longest request of the crashed core, and generates the
        tokens that release a request from quarantine: a core that fails here too fails at that
        length. It also loads what the first request would wait for, and starts the estimate of
        step times.
        """
        length, tokens = (self.longest_at_death, HARMLESS_TOKENS) if self.longest_at_death else (_SELF_TEST_LENGTH, 2)
        tokens = min(tokens, max_model_len - 1)
        prompt = [0] * min(length, max_model_len - tokens)
        if tokens > 0:
            try:
                async for _ in self._engine.generate(
                    prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                ):
                    pass
            except EngineDeadError as error:
                if not error.by_itself:
                    raise
                raise _unfit(error, len(prompt) + tokens) from error
        self._self_test_tokens = self._engine.stats.tokens

    async def _become_ready(self, tokenizer: TextTokenizer) -> None:
        info, models = self._engine.info, self._settings.models
        preparation = Preparation(
            tokenizer, models, ModelLimits(info.max_model_len, info.vocab_size, tuple(info.eos_token_ids))
        )
        leases, running = self._leases, self._running
        self._intake = Intake(
            self._queue,
            self.id,
            models,
            info.max_num_seqs,
            leases,
            preparation,
            lambda: running.load,
            self._start_requests,
        )
        self._quarantine = Quarantine(self._intake, self._running, self._requeue_from_checkpoints)
        self._record = msgspec.structs.replace(self._record, max_model_len=info.max_model_len)
        await self._set_state("ready")
        self.was_ready = True

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        assert self._intake is not None
        assert self._quarantine is not None
        report = statistics.report(self._running, self._engine, self._engine.info.num_blocks)
        return [
            asyncio.create_task(self._take_steps(), name="steps"),
            asyncio.create_task(self._intake.run(), name="intake"),
            asyncio.create_task(self._quarantine.run(), name="quarantine"),
            asyncio.create_task(self._outbox.run(self._running.due, self._running.any), name="outbox"),
            asyncio.create_task(report, name="statistics"),
            asyncio.create_task(
                statistics.report_gauges(self.id, self._engine, self._running.metrics, self._queue), name="gauges"
            ),
        ]

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return when ordered to stop; raise what ended a task."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in tasks:
            if task.done():
                task.result()

    async def _take_steps(self) -> None:
        assert self._intake is not None
        async for output in self._engine.steps():
            self._running.on_step(output)
            if any(output.finish):
                self._intake.room_made()

    def _start_requests(self, prepared: list[PreparedRequest], errors: list[Finished]) -> None:
        assert self._intake is not None
        assert self._quarantine is not None
        self._running.start(prepared)
        self._running.reject(errors)
        self._outbox.requests_run()
        if self._intake.isolated:
            self._quarantine.begin()

    async def _drain(self, steps: asyncio.Task[None]) -> None:
        """Stop in order: claim nothing, requeue what has not started, then what cannot finish in
        time, then the rest at the deadline, each with its checkpoint.
        """
        await self._set_state("draining")
        await self._stop_claiming()
        unstarted = self._running.drop_unstarted()
        await self._requeue(unstarted)
        if self._running.any():
            logger.info(
                "draining: %d requests may run for up to %.0f s",
                len(self._running.keys()),
                self._settings.shutdown_timeout,
            )
        begun, start, looked = 0, self._loop.time(), False
        deadline = start + self._settings.shutdown_timeout
        before, steps_before = self._running.tokens_left(), self._running.steps
        while self._running.any() and not steps.done() and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
            seconds = self._loop.time() - start
            if (
                not looked
                and seconds >= PACE_SECONDS
                and (self._running.steps >= steps_before + PACE_STEPS or self._engine.is_stopped())
            ):
                begun += await self._requeue_from_checkpoints(
                    self._running.hopeless(before, (deadline - start - seconds) / seconds)
                )
                looked = True
        if steps.done() and isinstance(death := steps.exception(), EngineDeadError) and death.by_itself:
            raise death
        begun += await self._requeue_from_checkpoints(self._running.keys())
        logger.info("stopped; requeued %d requests, %d of them partly generated", len(unstarted) + begun, begun)

    async def _stop_claiming(self) -> None:
        if self._intake is not None and self._quarantine is not None:
            await self._quarantine.close()
            await self._intake.pause()

    async def _requeue_from_checkpoints(self, keys: list[RequestKey], cleared: bool = False) -> int:
        """Publish pending results, then requeue the requests from their checkpoints; return how
        many.
        """
        deltas = self._running.checkpoint(keys)
        held = self._running.drop(keys)
        await self._deliver_last(deltas)
        await self._requeue(held, cleared)
        self.cleared_requests = self.cleared_requests or (cleared and bool(held))
        return len(held)

    async def _handle_crash(self, error: EngineDeadError) -> None:
        """Publish what the dead core had generated: its requests continue from there on another
        core. `_end` then gives up their leases.

        If the core crashed by itself they are quarantined; what never reached it is requeued.
        """
        reached = self._running.keys()
        logger.error("%s; requests in flight: %d", error, len(reached))
        await self._stop_claiming()
        await self._deliver_last(self._running.checkpoint(self._running.keys()))
        if error.by_itself:
            self.longest_at_death = max(self.longest_at_death, self._running.longest())
            held = self._running.drop(reached)
            await self._finish_leases(held, lambda: self._queue.quarantine(self.id, held, dead_letter(error)))
            await self._requeue(self._running.drop(self._running.keys()))

    async def _deliver_last(self, deltas: list[Delta]) -> None:
        if not await self._in_time(self._outbox.deliver(deltas)):
            logger.warning("Redis unavailable; the last results are lost and their requests run again")

    async def _requeue(self, held: list[Held], cleared: bool = False) -> None:
        await self._finish_leases(held, lambda: self._queue.requeue(self.id, held, cleared=cleared))

    async def _finish_leases(self, held: list[Held], action: Callable[[], object]) -> None:
        """Run `action` and drop the leases. They are renewed until Redis has recorded it: expired,
        they would count as a worker's death.
        """
        if held:
            if not await self._in_time(self._until_recorded(action)):
                logger.warning("Redis unavailable; %d requests wait until their leases expire", len(held))
            self._leases.drop(held)

    def _generated(self) -> int:
        """Tokens that this core has generated for requests."""
        return self._engine.stats.tokens - self._self_test_tokens

    async def _end(self) -> None:
        """Leave nothing registered and nothing running; what is still held counts as lost."""
        self._leases.stop()
        self._orders.stop()
        self._outbox.close()
        if self._intake is not None:
            self._intake.close()
        await self._call(lambda: self._queue.renew(self.id, [], self._generated()))
        await self._call(lambda: self._queue.remove_worker(self.id))
        if self._stopping.is_set():
            await self._set_state("stopped")
        await self._engine.stop()

    def _on_orders(self, orders: list[ControlMessage]) -> None:
        for order in orders:
            if order.kind == "bell" and self._intake is not None:
                self._intake.wake()
            elif order.kind == "cancel":
                self._leases.drop(self._running.cancel(order))
            elif order.kind == "watch":
                self._running.watch(order)
            elif order.kind == "trial" and self._quarantine is not None:
                self._quarantine.make_room()

    def _on_lost(self, held: list[Held]) -> None:
        running = self._running.lose(held)
        self._leases.drop(held)
        if running:
            logger.warning("stopped %d requests: cancelled, or their leases expired or were lost by Redis", running)

    def _from_thread(self, action: Callable[[T], None]) -> Callable[[T], None]:
        """The same action, called from another thread, runs in the event loop."""

        def call(value: T) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(action, value)

        return call

    async def _set_state(self, state: WorkerState) -> None:
        self._record = msgspec.structs.replace(self._record, state=state)
        await self._call(lambda: self._queue.register_worker(self._record))

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for Redis as long as it takes; once the worker is to stop, GOODBYE_SECONDS more.

        Return whether the work was done.
        """
        task, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait({task}, timeout=GOODBYE_SECONDS)
            if done:
                task.result()
            return bool(done)
        finally:
            task.cancel()
            stopping.cancel()

    async def _until_recorded(self, action: Callable[[], object]) -> None:
        failing = False
        while True:
            try:
                await asyncio.to_thread(action)
                return
            except QueueUnavailable as error:
                if not failing:
                    logger.warning("Redis unavailable; retrying requeue every %.1f s: %s", _RETRY_SECONDS, error)
                failing = True
                await asyncio.sleep(_RETRY_SECONDS)

    async def _call(self, action: Callable[[], object]) -> None:
        """Call Redis and ignore outages: leases and records expire by themselves."""
        try:
            await asyncio.to_thread(action)
        except QueueUnavailable as error:
            logger.warning("Redis unavailable; the worker's record expires by itself if it stays away: %s", error)


def _unfit(error: EngineDeadError, tokens: int) -> EngineDeadError:
    """Return the error of a core that crashed at the worker's own request of `tokens` tokens."""
    blame = (
        f"an engine core failed at a harmless request of {tokens} tokens, so the device or the installation is at"
        " fault, not a request"
    )
    return EngineDeadError(f"{blame}: {error}", error.returncode)


def dead_letter(error: EngineDeadError) -> Result:
    """Return the result of a request that crashed an engine core even in isolation."""
    message = (
        "This request was given up, because every time it ran the engine failed, at last with nothing beside it:"
        f" {error.reason}."
    )
    return ApiError(500, message, "server_error", code="engine_crashed").result(new_request_id())
