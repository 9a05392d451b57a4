"""Run the engine core's loop over scheduler and executor.

It runs in a separate process, or synchronously inside a test.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from workers.engine.guides.compiler import GuideCompiler
from workers.engine.guides.guide import Guide, is_void
from workers.engine.guides.guide_threads import GuideThreads
from workers.engine.messages.core import (
    AbortRequests,
    AddRequests,
    EngineRequest,
    Finish,
    Ready,
    SetVocabulary,
    Shutdown,
    StepOutput,
    ToCore,
)
from workers.engine.messages.errors import StepAbandoned, StepOutOfMemory
from workers.engine.messages.step import StepPlan, TokenMasks
from workers.engine.profiling import StepTrace, mark_spans, span
from workers.engine.scheduling.hybrid_cache import make_cache
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.scheduling.step_time import AdaptiveBatchSize, StepTimeEstimate

if TYPE_CHECKING:
    from workers.engine.attention.context import Interruption
    from workers.engine.device.executor import Executor
    from workers.engine.device.model_runner import LaunchedStep

logger = logging.getLogger(__name__)

# An admission batch is a 16th of the slots, if steps without a prompt are CUDA graphs
_ADMISSION_BATCHES = 16
# Share of step time that abandoned steps may lose, and the most seconds of it that accumulate
_LOST_SHARE, _MOST_LOST_SECONDS = 0.05, 5.0
_IDLE_SECONDS = 0.5  # without a message, until blocks of the cache are populated
_POPULATE_PAUSE = 0.002  # seconds between two parts, unless a message arrives
_SINGLE_TOKEN_TRIES = 3
_SINGLE_TOKEN_PAUSE = 0.2  # seconds


class EngineCore:
    """Receives requests, then schedules, launches and retires steps and emits their tokens.

    Blocks when idle.
    """

    def __init__(self, executor: "Executor") -> None:
        config, model = executor.config, executor.model_config
        self._executor = executor
        self._depth = config.depth
        self._whole_prompts = model.whole_prompts
        self._devices = config.tensor_parallel_size
        self._launched: deque[tuple[StepPlan, LaunchedStep, float]] = deque()  # with its planning time
        self._last: LaunchedStep | None = None  # to be retired
        self._step_time = StepTimeEstimate(config.max_num_batched_tokens)
        self._batch_size = AdaptiveBatchSize(config.max_num_batched_tokens)
        self._single_token_tries = 0
        self._guide_threads = GuideThreads(config.threads)
        self._guides = GuideCompiler(executor.vocab_size, executor.eos_token_ids, self._guide_threads)
        self._retired: StepOutput | None = None  # by the launch of a guided step
        self._serving = False
        self._stalled = False  # whether nothing can be computed until a guide is ready
        self._interruption = executor.interruption
        self._interruptible_until = 0.0  # by time.perf_counter()
        self._may_lose = _MOST_LOST_SECONDS  # seconds that abandoned steps may still lose
        self._live_received = self._live_taken = 0  # message counts
        self._trace = StepTrace(Path(config.profile), config.device) if config.profile else None
        if config.nvtx:
            mark_spans()
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            make_cache(
                executor.cache_groups,
                executor.num_pages,
                (config.depth + 1) * config.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            config.depth,
            vocab_size=executor.vocab_size,
            eos_token_ids=executor.eos_token_ids,
            live_step_seconds=config.live_step_ms / 1000,
            admission_batch=max(1, config.max_num_seqs // _ADMISSION_BATCHES)
            if executor.runner.graphs is not None
            else 1,
            tasks=model.tasks,
            whole_prompts=model.whole_prompts,
            guide_threads=self._guide_threads,
        )
        self.scheduler.forget_grammar = self._guides.forget
        self.ready = Ready(
            max_model_len=self.scheduler.max_model_len,
            num_blocks=self.scheduler.num_blocks,
            block_size=self.scheduler.block_size,
            cache_tokens=self.scheduler.cache_tokens,
            vocab_size=executor.vocab_size,
            eos_token_ids=list(executor.eos_token_ids),
            dtype=str(executor.dtype).removeprefix("torch."),
            device=config.device,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            depth=config.depth,
            threads=config.threads,
            weights_seconds=executor.weights_seconds,
            gpus=executor.gpus,
            backend=config.attention_backend,
            cache_dtype=config.cache_dtype,
            quantization=config.quantization or "",
            model_digest=executor.model_digest,
            tasks=list(model.tasks),
            embedding_size=model.embedding_size,
            labels=list(model.pooling.labels) if model.pooling is not None else [],
            matryoshka=model.matryoshka_sizes(),
        )

    def run(self, inbox: SimpleQueue[ToCore], emit: Callable[[StepOutput], None]) -> None:
        """Serve until a `Shutdown` message.

        Raises the executor's errors; the core is unusable afterwards.
        """
        self._serving = True
        self._guides.woken = self._guide_threads.woken = lambda: inbox.put(AddRequests([]))
        while self._take_in(inbox):
            began = time.monotonic()
            if self._trace is not None:
                self._trace.next_step()
            output = self.step()
            if output is not None:
                seconds = time.monotonic() - began
                self._step_time.record(seconds, output.stats.computed_tokens)
                output.stats.full_step_seconds = self._step_time.full_step
                output.stats.step_seconds = [(seconds, "") for _ in output.stats.step_rows]
                emit(output)
        if self._trace is not None:
            self._trace.close()

    def interrupt_for(self, message: ToCore) -> None:
        """Abandon a step that has only batch requests for a live request, unless it is about to
        end.

        The receiving thread must call this once the message is in the inbox.
        """
        if self._interruption is not None and _has_live(message):
            self._live_received += 1
            if time.perf_counter() < self._interruptible_until:
                self._interruption.set()

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Add requests; one with a guide waits for its compilation while other requests run."""
        for request in requests:
            if request.guide is None or is_void(request.guide):
                self.scheduler.add(request)
            else:
                self._guides.submit(request)

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            waiting = self._guides.abort(request_id)
            if waiting is not None:
                self.scheduler.refuse(waiting, Finish.ABORT)
            else:
                self.scheduler.abort([request_id])

    def set_vocabulary(self, tokens: list[bytes]) -> None:
        """Set the bytes of each token, which requests with a guide need."""
        self._guides.set_vocabulary(tokens)

    @property
    def busy(self) -> bool:
        """Return whether a request is unfinished or a launched step not yet retired."""
        return bool(self._has_steps or self._guides.waiting)

    def step(self) -> StepOutput | None:
        """Launch the next step, if possible, and retire the oldest if more than `depth` are
        launched.

        Returns the output of the retired step. If all requests wait for their guides, and no
        message can arrive meanwhile, it waits too.
        """
        self._stalled = False
        self._add_guided(wait=not (self._has_steps or self._serving))
        released = self.scheduler.release_held()
        if released is not None:
            return released
        began = time.perf_counter()
        with span("schedule"):
            plan = self.scheduler.schedule()
        if plan is not None:
            try:
                launched = self._launch(plan)
            except StepAbandoned:
                self._may_lose -= time.perf_counter() - began
                self.scheduler.undo(plan)
                return self._retire() if self._launched else self.scheduler.ended()
            except StepOutOfMemory as error:
                return self._handle_out_of_memory(plan, error)
            self._launched.append((plan, launched, began))
            self._single_token_tries = 0
            self.scheduler.token_budget = self._batch_size.fitted()
        if self._retired is not None:
            return self._take_retired()
        if self._launched and (plan is None or len(self._launched) > self._depth):
            return self._retire()
        if plan is None and self.scheduler.unfinished:
            self._stall()
        return self.scheduler.ended()

    def _stall(self) -> None:
        """Record that all requests wait for their guides; wait too if no message can arrive."""
        held = self.scheduler.held
        if not held:
            raise RuntimeError(f"{self.scheduler.unfinished} requests are left and none can be scheduled")
        self._stalled = True
        if not self._serving:
            self._guide_threads.wait_for(held)

    @property
    def _has_steps(self) -> bool:
        return bool(self.scheduler.unfinished or self._launched)

    def _add_guided(self, wait: bool) -> None:
        """Pass requests whose guides are compiled to the scheduler."""
        for request, made in self._guides.take_made(wait):
            if isinstance(made, Guide):
                self.scheduler.add(request, made)
            else:
                self.scheduler.refuse(request, made.finish, made.error)
        # Once no more steps may be abandoned, because live requests came too often, short steps are
        # needed
        self.scheduler.expect_live(self._guides.live_wait or self._may_lose <= 0)

    def _launch(self, plan: StepPlan) -> "LaunchedStep":
        """Launch a step.

        Masks are made beside the model's forward pass: from the end of the step before on if all
        earlier tokens are known, else once this step is launched and the step before is retired.
        """
        if self._interruption is not None:
            self._prepare_interruption(self._interruption, plan)
        if not plan.guided:
            return self._executor.launch(plan)
        return self._executor.launch(plan, partial(self._masks, plan))

    def _prepare_interruption(self, interruption: "Interruption", plan: StepPlan) -> None:
        """Set the time until which this step may be abandoned.

        A step may be abandoned while more of it is left than a live step takes, unless too much
        time was already lost. Live requests that arrive more often than batch steps end would
        otherwise stop the batch. The interruption is set at once if a live request has arrived
        since the inbox was emptied.
        """
        may_lose = self._may_lose > 0 and not self.scheduler.has_live
        long = self.scheduler.seconds_beyond_live_step(plan) if may_lose else 0.0
        self._interruptible_until = time.perf_counter() + long
        interruption.clear()
        if long > 0 and self._live_received > self._live_taken:
            interruption.set()

    def _masks(self, plan: StepPlan) -> TokenMasks:
        """Return the masks of a step; leave out the rows whose masks are late."""
        if any(request.known > len(request.tokens) + 1 for request in self.scheduler.guided(plan)):
            self._retired = self._retire()
        with span("masks"):
            rows = zip(plan.guided, self.scheduler.guided(plan), strict=True)
            guided = [(row, request.guide) for row, request in rows if request.guide is not None]
            masks, late = self._guide_threads.masks(guided, self.scheduler.predict(plan))
            self.scheduler.leave_out(late)
            self.scheduler.fail_guided(plan)
        return masks

    def _take_retired(self) -> StepOutput | None:
        retired, self._retired = self._retired, None
        return retired

    def _retire(self) -> StepOutput:
        plan, launched, began = self._launched.popleft()
        with span("retire"):
            result = self._executor.retire(launched)
            self._record_time(plan, launched, began)
            output = self.scheduler.update(plan, result)
        output.stats.step_rows = [(len(plan.counts), "")]
        output.stats.step_tokens = [(int(plan.counts.sum()), "")]
        return output

    def _record_time(self, plan: StepPlan, launched: "LaunchedStep", began: float) -> None:
        """Record a step's own time: from its planning, or from the end of the step before it."""
        seconds = launched.seconds_since(began)
        if self._last is not None:
            seconds = min(seconds, launched.seconds_after(self._last))
        self._last = launched
        cost = self.scheduler.step_cost
        cost.record(plan.starts, plan.counts, seconds)
        self.scheduler.charge(plan, seconds * self._devices)
        self._may_lose = min(_MOST_LOST_SECONDS, self._may_lose + _LOST_SHARE * seconds)
        if cost.known:
            self.scheduler.admission.step_cost_tokens = cost.empty / cost.prompt(0, 1)

    def _handle_out_of_memory(self, plan: StepPlan, error: StepOutOfMemory) -> StepOutput | None:
        """Handle a step that did not fit into memory: halve the token budget.

        A request fails if its single token does not fit, or its whole prompt if that cannot be
        split.
        """
        request_ids, tokens = self.scheduler.undo(plan), int(plan.counts.sum())
        if len(plan.counts) > 1 if self._whole_prompts else tokens > 1:
            self.scheduler.token_budget = self._batch_size.did_not_fit(tokens)
            logger.warning("a step of %d tokens does not fit into memory (%s); trying smaller steps", tokens, error)
        elif not self._launched:
            self._single_token_tries += 1
            time.sleep(_SINGLE_TOKEN_PAUSE)  # another process may have used the memory briefly
        if self._retired is not None:
            return self._take_retired()
        if self._launched:
            return self._retire()
        if self._single_token_tries >= _SINGLE_TOKEN_TRIES:
            self._single_token_tries = 0
            (request_id,) = request_ids
            what = "this request does not fit" if self._whole_prompts else "not even one token of this request fits"
            logger.error("request %d failed: %s into memory (%s)", request_id, what, error)
            self.scheduler.fail(request_id, f"{what} into memory: {error}")
        return self.scheduler.ended()

    def _take_in(self, inbox: SimpleQueue[ToCore]) -> bool:
        """Handle all queued messages, and wait for one when idle; return False after `Shutdown`."""
        if (self._stalled or not self._has_steps) and not self._handle(self._wait_for_message(inbox)):
            return False
        while True:
            try:
                message = inbox.get_nowait()
            except Empty:
                return True
            if not self._handle(message):
                return False

    def _wait_for_message(self, inbox: SimpleQueue[ToCore]) -> ToCore:
        """Wait for the next message. If none comes for a while, populate blocks of the cache."""
        memory, pause = self._executor.cache_memory, _IDLE_SECONDS
        while memory is not None and memory.is_behind:
            try:
                return inbox.get(timeout=pause)
            except Empty:
                memory.populate()
            pause = _POPULATE_PAUSE
        return inbox.get()

    def _handle(self, message: ToCore) -> bool:
        match message:
            case AddRequests(requests):
                self._live_taken += _has_live(message)
                self.add(requests)
            case AbortRequests(request_ids):
                self.abort(request_ids)
            case SetVocabulary(tokens):
                self.set_vocabulary(tokens)
            case Shutdown():
                return False
        return True


def _has_live(message: ToCore) -> bool:
    return isinstance(message, AddRequests) and any(request.live for request in message.requests)
