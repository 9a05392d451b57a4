"""The engine core's loop over scheduler and executor. Runs in a process of its own, or synchronously inside a test."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from workers.engine.kv_cache import KVCache
from workers.engine.messages import AbortRequests, AddRequests, EngineRequest, Ready, Shutdown, StepOutput, ToCore
from workers.engine.scheduler import Scheduler
from workers.engine.step import StepPlan

if TYPE_CHECKING:
    from workers.engine.executor import Executor
    from workers.engine.model_runner import LaunchedStep


class EngineCore:
    """Takes requests in, schedules, launches, retires the step before and emits its tokens, over and over; blocks when idle."""

    def __init__(self, executor: "Executor") -> None:
        config = executor.config
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        assert config.max_model_len is not None
        assert config.block_size is not None
        assert config.depth is not None
        assert config.threads is not None
        self._executor = executor
        self._debug = config.debug
        self._depth = config.depth
        self._launched: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._pace = _Pace(config.max_num_batched_tokens)
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            KVCache(executor.num_blocks, config.block_size, config.enable_prefix_caching),
            config.depth,
            vocab_size=executor.vocab_size,
            eos_token_ids=executor.eos_token_ids,
        )
        self.ready = Ready(
            max_model_len=self.scheduler.max_model_len,
            num_blocks=executor.num_blocks,
            block_size=config.block_size,
            vocab_size=executor.vocab_size,
            eos_token_ids=list(executor.eos_token_ids),
            dtype=str(executor.dtype).removeprefix("torch."),
            device=config.device,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            depth=config.depth,
            threads=config.threads,
            weights_seconds=executor.weights_seconds,
        )

    def run(self, inbox: SimpleQueue[ToCore], emit: Callable[[StepOutput], None]) -> None:
        """Serves until a `Shutdown` comes. Raises what the executor raises; then nothing of this core can be used any more."""
        while self._take_in(inbox):
            began = time.monotonic()
            output = self.step()
            if output is not None:
                self._pace.note(time.monotonic() - began, output.stats.computed_tokens)
                output.stats.full_step_seconds = self._pace.full_step
                emit(output)

    def add(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            self.scheduler.add(request)

    def abort(self, request_ids: Iterable[int]) -> None:
        self.scheduler.abort(request_ids)

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or a launched step not yet retired."""
        return bool(self.scheduler.unfinished or self._launched)

    def step(self) -> StepOutput | None:
        """Launches the next step, if one can be, and retires the oldest once more than `depth` are launched; returns what that brought."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append((plan, self._executor.launch(plan)))
        if self._launched and (plan is None or len(self._launched) > self._depth):
            oldest, launched = self._launched.popleft()
            return self.scheduler.update(oldest, self._executor.retire(launched))
        if plan is None and self.scheduler.unfinished:
            raise RuntimeError(f"{self.scheduler.unfinished} requests are left and none can be scheduled")
        return self.scheduler.ended()

    def _take_in(self, inbox: SimpleQueue[ToCore]) -> bool:
        """Handles all messages there are, and waits for one when there is nothing else to do; False once told to shut down."""
        if not self.busy:
            if self._debug:
                self.scheduler.check_idle()
            if not self._handle(inbox.get()):
                return False
        while True:
            try:
                message = inbox.get_nowait()
            except Empty:
                return True
            if not self._handle(message):
                return False

    def _handle(self, message: ToCore) -> bool:
        match message:
            case AddRequests(requests):
                self.add(requests)
            case AbortRequests(request_ids):
                self.abort(request_ids)
            case Shutdown():
                return False
        return True


class _Pace:
    """How long a full step may take, by the longest so far and by the least that a token took: short steps say little about a long one."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._full = max_num_batched_tokens
        self._longest = 0.0
        self._per_token = math.inf
        self._computed = 0

    def note(self, seconds: float, computed_tokens: int) -> None:
        """A turn of the loop, and how many tokens all steps together have computed."""
        if computed_tokens > self._computed:
            self._longest = max(self._longest, seconds)
            self._per_token = min(self._per_token, seconds / (computed_tokens - self._computed))
            self._computed = computed_tokens

    @property
    def full_step(self) -> float:
        """Seconds; 0 before the first step."""
        return max(self._longest, self._per_token * self._full) if self._computed else 0.0
