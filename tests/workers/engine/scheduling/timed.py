"""A scheduler and a device on a clock of their own: a step takes what the device's costs say."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.messages.core import EngineRequest, LiveShare, SamplingParams, StepOutput
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.scheduler import Scheduler

LIVE_STEP = 0.15
# Seconds of a step, a row, a token of its context, a prompt token, a pair: GPT-2 on two cores
DEVICE = (0.016, 0.5e-3, 0.5e-6, 0.42e-3, 0.11e-6)


@dataclass(eq=False)
class TimedCall:
    """When a request came, and when each of its tokens."""

    live: bool
    arrived: float
    tokens: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False))


@dataclass
class TimedStep:
    """A step that ran: when it ended, how long it took, what it had."""

    end: float
    seconds: float
    predicted: float
    live: bool  # a live request ran or waited when it was planned
    rows: int
    live_rows: int
    batch_prompt_tokens: int
    decode_seconds: float  # of all its decode rows


class TimedEngine:
    """`load` adds requests by `add` each time before a step is planned."""

    def __init__(
        self,
        *,
        depth: int = 0,
        slots: int = 64,
        blocks: int = 5000,
        budget: int = 1024,
        noise: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.scheduler = Scheduler(
            slots, budget, 4096, KVCache(blocks, 16), depth, vocab_size=50_000, live_step_seconds=LIVE_STEP
        )
        self.now = 0.0
        self.calls: list[TimedCall] = []
        self.steps: list[TimedStep] = []
        self.draw = random.Random(seed)
        self._depth, self._noise = depth, noise
        self._launched: deque[tuple[StepPlan, TimedStep]] = deque()
        self._idle_at = 0.0  # when the device has done all that was launched
        self._slots: dict[int, bool] = {}  # whether the request is live

    def add(
        self, prompt: int, output: int, *, live: bool, at: float | None = None, share: LiveShare | None = None
    ) -> TimedCall:
        number = len(self.calls)
        tokens = [self.draw.randrange(50_000) for _ in range(prompt)]
        self.calls.append(TimedCall(live, self.now if at is None else at))
        sampling = SamplingParams(output, ignore_eos=True)
        self.scheduler.add(EngineRequest(number, tokens, [], sampling, live, share=share))
        return self.calls[-1]

    @property
    def unfinished_batch(self) -> int:
        queues = self.scheduler._queues
        return len(queues.batch.running) + len(queues.batch.waiting)

    def turn(self) -> None:
        """Launch a step if one can be, and retire one, as the core does."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        if self._launched and (plan is None or len(self._launched) > self._depth):
            self._retire()
        self._take(self.scheduler.ended())

    def run_dry(self) -> None:
        while self.scheduler.unfinished or self._launched:
            self.turn()
        check_idle(self.scheduler)

    def _launch(self, plan: StepPlan) -> None:
        queues, cost = self.scheduler._queues, self.scheduler.step_cost
        for request in queues.running:
            self._slots[request.slot] = request.live
        live = np.array([self._slots[slot] for slot in plan.slots.tolist()])
        decodes = plan.counts == 1
        work = (1.0, decodes.sum(), plan.starts @ decodes, (plan.counts * ~decodes).sum(), _pairs(plan, ~decodes))
        seconds = float(np.dot(DEVICE, work)) * self.draw.uniform(1 - self._noise, 1 + self._noise)
        self._idle_at = max(self._idle_at, self.now) + seconds
        step = TimedStep(
            self._idle_at,
            seconds,
            cost.predict(plan.starts, plan.counts),
            bool(queues.live.running or queues.live.waiting),
            len(live),
            int(live.sum()),
            int(plan.counts[~live & ~decodes].sum()),
            float(np.dot(DEVICE[:3], work[:3])),
        )
        self._launched.append((plan, step))

    def _retire(self) -> None:
        plan, step = self._launched.popleft()
        self.now = step.end
        self.steps.append(step)
        self.scheduler.step_cost.record(plan.starts, plan.counts, step.seconds)
        self._take(self.scheduler.update(plan, StepResult(np.zeros(int(plan.samples.sum()), dtype=np.int32))))

    def _take(self, output: StepOutput | None) -> None:
        if output is not None:
            for number, count, finish in zip(output.request_ids, output.counts, output.finish, strict=True):
                self.calls[number].tokens += [self.now] * count
                self.calls[number].ended = bool(finish)


def _pairs(plan: StepPlan, rows: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> float:
    return float((plan.counts * (plan.starts + plan.counts / 2))[rows].sum())
