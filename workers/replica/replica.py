"""Serve one engine core: intake, leases, control messages and results of its requests.

The worker process starts the core (`starting.py`), serves with it (`serving.py`) until ordered to
stop, and then drains (`draining.py`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from functools import partial

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.requests import RequestKey
from jobs.queue.request_queue import Held, Queue
from jobs.queue.streams import ControlMessage
from jobs.tracing import Tracing
from workers.default_parameters import defaults_in, local_defaults, shown
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError
from workers.engine.client.launch import LaunchedCore
from workers.engine.client.watchdog import WatchdogTimeout
from workers.replica.answer_parsers import AnswerParsers, find_parsers
from workers.replica.duplicates import Digest, prepare_once
from workers.replica.fingerprint import system_fingerprint
from workers.replica.grammars import Grammars
from workers.replica.intake import Intake
from workers.replica.leases import Leases
from workers.replica.orders import Orders
from workers.replica.outbox import Outbox
from workers.replica.pooling_preparation import PoolingPreparation, prepare_each
from workers.replica.preparation import Preparation
from workers.replica.prepared import Prepare
from workers.replica.quarantine import Quarantine
from workers.replica.registration import Registration
from workers.replica.requeue import Requeue
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.replica.serving import Serving
from workers.replica.starting import described, start_engine
from workers.replica.stopping import wait_or_stop
from workers.replica.tokenization import Tokenization, TokenizerAnswers
from workers.replica.tracing import RequestTraces
from workers.settings import WorkerSettings
from workers.text.sentence_files import SentenceFiles
from workers.text.tokenizer import TextTokenizer, locate

logger = logging.getLogger(__name__)


class Replica:
    """One engine core, the requests held for it, and the tasks that serve them.

    A replica lasts as long as its core; the next core gets a new one, with its own id.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        tokenizer: asyncio.Future[TextTokenizer],
        grammars: Grammars,
        watchdog_timeout: WatchdogTimeout,
        stopping: asyncio.Event,
        longest_at_death: int = 0,
        launched: LaunchedCore | None = None,
        tracing: Tracing | None = None,
        suspects: set[Digest] | None = None,
    ) -> None:
        """Create a replica; `stopping` is set when it must end. Raises WorkerError.

        `longest_at_death` is the token count of the longest request of an earlier core of this
        worker that crashed by itself, or 0. `launched` is a core that already loads its model.
        `suspects` is passed to `Duplicates`.
        """
        self.was_ready = False
        self.isolated = False  # whether only quarantined requests ran at its end
        self.longest_at_death = longest_at_death
        self._settings = settings
        self._queue = queue
        self._tokenizer = tokenizer
        self._stopping = stopping
        loop = asyncio.get_running_loop()
        self._defaults = local_defaults(settings)
        self._registration = Registration(queue, settings.models, self._defaults, settings.aliases)
        worker, interval = self._registration.id, settings.stream_interval
        self._parsers = AnswerParsers()  # replaced once the chat template is loaded
        self._engine = AsyncEngine(settings.engine, watchdog_timeout, launched, self._vocabulary)
        self._leases = Leases(
            queue,
            worker,
            settings.lease_seconds,
            self._generated,
            lambda held: loop.call_soon_threadsafe(self._on_lost, held),
        )
        self._outbox = Outbox(queue, worker, interval, self._generated, self._on_ended, self._on_lost)
        self._traces = None if tracing is None else RequestTraces(tracing, worker)
        self._running = Running(self._engine, self._outbox, grammars, loop.time, interval, self._traces, suspects)
        self._requeue = Requeue(queue, worker, self._running, self._outbox, self._leases, stopping)
        self._orders = Orders(queue, worker, lambda orders: loop.call_soon_threadsafe(self._on_orders, orders))
        self._on_order: dict[str, Callable[[ControlMessage], None]] = {
            "cancel": self._cancel,
            "watch": self._running.watch,
        }
        self._cancel_in_tokenizer: Callable[[list[RequestKey]], list[Held]] = lambda keys: []
        self._self_test_tokens = 0

    @property
    def has_answered(self) -> bool:
        """Return whether a request was answered here."""
        return self._running.finished > self._running.failed

    @property
    def cleared_requests(self) -> bool:
        """Return whether requests were released from quarantine here."""
        return self._requeue.cleared

    async def run(self, pause: float = 0.0) -> None:
        """Serve until ordered to stop. The worker is registered at once; the core starts after
        `pause` seconds.

        Raises WorkerError or EngineStartError if it cannot start. After a crash it requeues
        everything and raises EngineDeadError.
        """
        try:
            await self._registration.set_state("loading")
            self._leases.start()
            self._orders.start()
            await wait_or_stop(self._stopping, timeout=pause)
            serving = None if self._stopping.is_set() else await self._start()
            if serving is not None:
                await self._serve(serving)
        finally:
            await self._end()

    async def _start(self) -> Serving | None:
        """Load tokenizer and engine side by side; return None when ordered to stop meanwhile."""
        started = time.monotonic()
        engine = asyncio.create_task(start_engine(self._engine, self._settings.start_timeout, self.longest_at_death))
        try:
            await wait_or_stop(self._stopping, engine, self._tokenizer)
            if self._tokenizer.done() and not engine.done():
                self._tokenizer.result()
                await self._registration.set_state("initializing")
            for loading in (engine, self._tokenizer):
                await wait_or_stop(self._stopping, loading)
                if self._stopping.is_set():
                    return None
                loading.result()
        except EngineDeadError as error:
            logger.error("%s", error)
            raise
        finally:
            engine.cancel()
        self._self_test_tokens = self._engine.stats.tokens
        files = await self._sentence_files()
        tokenizer = self._tokenizer.result()
        if "generate" in self._engine.info.tasks:
            tokenizer.chat_template.warn_if_missing()
            self._parsers = await asyncio.to_thread(find_parsers, self._settings, tokenizer.chat_template)
        defaults = await self._find_defaults()
        serving = self._make_serving(tokenizer, files, defaults)
        await self._registration.set_state("ready", self._engine.info)
        self.was_ready = True
        # Objects that live on after loading; the garbage collector would delay tokens by scanning
        # them
        gc.collect()
        gc.freeze()
        seconds, worker, models = time.monotonic() - started, self._registration.id, ", ".join(self._settings.models)
        logger.info("ready after %.1f s as %s: %s %s", seconds, worker, models, described(self._engine.info))
        return serving

    async def _find_defaults(self) -> DefaultParameters:
        """Return and register what applies to parameters that a call leaves unset."""
        defaults = self._defaults
        if defaults is None:  # known once the engine has the hub's files
            model = self._settings.engine.model
            defaults = await asyncio.to_thread(lambda: defaults_in(locate(model), self._settings))
            self._registration.note_defaults(defaults)
        if defaults and "generate" in self._engine.info.tasks:
            message = "calls get the model's defaults for what they leave unset: %s (--generation-config vllm: none)"
            logger.info(message, shown(defaults))
        return defaults

    def _make_serving(self, tokenizer: TextTokenizer, files: SentenceFiles, defaults: DefaultParameters) -> Serving:
        info, models, queue, running = self._engine.info, self._settings.models, self._queue, self._running
        tasks = (*info.tasks, "tokenize")
        limits = ModelLimits(info.max_model_len, info.vocab_size, tuple(info.eos_token_ids), tasks)
        retries, fingerprint = self._settings.retry_on_invalid, system_fingerprint(info)
        texts = Preparation(tokenizer, models, limits, self._parsers, retries, self._traces, fingerprint, defaults)
        numbers = PoolingPreparation(tokenizer, models, info, files, self._traces, fingerprint)
        tokenization = Tokenization(TokenizerAnswers(tokenizer, models, limits), self._outbox, running.metrics)
        worker, sizes = self._registration.id, (info.max_num_seqs, info.max_num_batched_tokens)
        prepare: Prepare = partial(prepare_each, texts, numbers)
        if self._settings.deduplicate:
            prepare = partial(prepare_once, prepare, running.prepared, self._traces)
        leases, traces = self._leases, self._traces
        intake = Intake(queue, worker, models, *sizes, leases, prepare, tokenization, lambda: running.load, traces)
        running.room_made = intake.room_made
        self._outbox.results_may_wait = lambda: intake.has_backlog and not running.is_watched
        self._cancel_in_tokenizer = tokenization.cancel
        quarantine = Quarantine(intake, running, self._requeue.from_checkpoints)
        self._on_order |= {"bell": lambda _: intake.wake(), "isolate": lambda _: quarantine.make_room()}
        engine, registration, outbox = self._engine, self._registration, self._outbox
        return Serving(queue, registration, engine, running, outbox, self._requeue, intake, quarantine)

    async def _sentence_files(self) -> SentenceFiles:
        """Return the text settings in the model's folder, for pooling models only."""
        if "generate" in self._engine.info.tasks:
            return SentenceFiles()
        return await asyncio.to_thread(lambda: SentenceFiles.read(locate(self._settings.engine.model)))

    def _vocabulary(self) -> list[bytes]:
        """Return the bytes of each token, which a guide needs to detect the end of reasoning."""
        return self._tokenizer.result().vocabulary(self._parsers.reasoning_markers)

    async def _serve(self, serving: Serving) -> None:
        try:
            await serving.run(self._stopping, self._settings.shutdown_timeout)
        finally:
            self.isolated = serving.intake.isolated
            self.longest_at_death = max(self.longest_at_death, serving.longest_at_death)

    async def _end(self) -> None:
        """Remove the registration and stop all tasks; leases still held count as lost."""
        self._leases.stop()
        self._orders.stop()
        self._outbox.close()
        if self._traces is not None:
            self._traces.close()
        if await self._registration.remove(self._generated()) and self._stopping.is_set():
            await self._registration.set_state("stopped")
        await self._engine.stop()

    def _generated(self) -> int:
        """Return how many tokens this core has generated for requests, excluding the self-test.

        Tokens of copies count too, since they are delivered.
        """
        if not self.was_ready:
            return 0
        return self._engine.stats.tokens - self._self_test_tokens + self._running.copied_tokens

    def _on_orders(self, orders: list[ControlMessage]) -> None:
        for order in orders:
            handle = self._on_order.get(order.kind)
            if handle is not None:
                handle(order)

    def _cancel(self, order: ControlMessage) -> None:
        self._running.cancel(order)
        self._cancel_in_tokenizer(order.keys)
        self._on_ended(self._leases.named(order))  # including requests under preparation

    def _on_ended(self, held: list[Held]) -> None:
        self._leases.drop(held)
        self._running.room_made()

    def _on_lost(self, held: list[Held]) -> None:
        running = self._running.lose(held)
        self._on_ended(held)
        if running:
            logger.warning("stopped %d requests: cancelled, or their leases expired or were lost by Redis", running)
