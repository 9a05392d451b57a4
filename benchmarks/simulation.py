"""The scheduler without a model: output lengths are random, and computed tokens are counted."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from workers.engine.messages.config import CPU_LIVE_STEP_MS
from workers.engine.messages.core import EngineRequest, SamplingParams, Stats, StepOutput
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.admission import AdmissionPolicy
from workers.engine.scheduling.kv_cache import KVCache, hash_block
from workers.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
EOS = 50_000


@dataclass(frozen=True)
class SimulatedLine:
    """A request and the length of its answer, which `max_tokens` may cut.

    `known`: only `max_tokens` can end it.
    """

    prompt: list[int]
    output: int
    max_tokens: int = 1024
    live: bool = False
    known: bool = False
    batch_id: str = "batch"


@dataclass
class Report:
    """The counts of a simulation.

    - `recomputed`: tokens that the same request had computed before
    - `hits`: cached prompt tokens, by line
    - `computed_at`: lines that computed a whole block of a prompt, with the step, by hash
    """

    steps: int = 0
    rows: int = 0
    computed: int = 0
    recomputed: int = 0
    hits: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # lines in the order of their ends
    stats: Stats = field(default_factory=Stats)
    computed_at: dict[bytes, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def recomputed_share(self) -> float:
        return self.recomputed / self.computed


class Simulation:
    """Submits lines to a scheduler like a worker: in order, an eighth more than there are slots.

    `admission` makes another policy than the scheduler's own. The last token of each prompt is
    replaced by the line's number, so that a plan identifies the request.
    """

    def __init__(
        self,
        lines: Sequence[SimulatedLine],
        num_blocks: int,
        *,
        slots: int = 64,
        budget: int = 2048,
        depth: int = 0,
        admission: Callable[[KVCache], AdmissionPolicy] | None = None,
    ) -> None:
        self._lines = lines
        self._prompts = [[*line.prompt[:-1], number] for number, line in enumerate(lines)]
        self._hashes = [_hashes(prompt) for prompt in self._prompts]
        kv_cache = KVCache(num_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(
            slots,
            budget,
            4096,
            kv_cache,
            depth,
            vocab_size=EOS + 1,
            eos_token_ids=[EOS],
            live_step_seconds=CPU_LIVE_STEP_MS / 1000,
        )
        if admission is not None:
            self.scheduler._queues._policy = admission(kv_cache)
        self._most = slots + max(2, slots // 8)
        self._depth = depth
        self._added = 0
        self._numbers = [-1] * slots
        self._reached = [0] * len(lines)
        self.report = Report()

    def run(self) -> Report:
        launched: deque[tuple[StepPlan, StepResult]] = deque()
        while len(self.report.order) < len(self._lines) or launched:
            self._feed()
            plan = self.scheduler.schedule()
            if plan is not None:
                launched.append((plan, self._compute(plan)))
            assert plan is not None or launched, "requests are left and nothing moves"
            if plan is None or len(launched) > self._depth:
                self._take(self.scheduler.update(*launched.popleft()))
        return self.report

    def _feed(self) -> None:
        while self._added < len(self._lines) and self._added - len(self.report.order) < self._most:
            line, number = self._lines[self._added], self._added
            sampling = SamplingParams(line.output if line.known else line.max_tokens, ignore_eos=line.known)
            batch_id = "" if line.live else line.batch_id
            self.scheduler.add(EngineRequest(number, self._prompts[number], [], sampling, line.live, batch_id=batch_id))
            self._added += 1

    def _compute(self, plan: StepPlan) -> StepResult:
        for added in plan.added:
            self._numbers[added.slot] = added.token_ids[added.prompt_length - 1]
        report, tokens = self.report, []
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True)
        for slot, start, count, samples in rows:
            number, end = self._numbers[slot], start + count
            line, reached = self._lines[number], self._reached[number]
            report.recomputed += max(0, min(end, reached) - start)
            self._reached[number] = max(reached, end)
            for name in self._hashes[number][start // BLOCK_SIZE : end // BLOCK_SIZE]:
                report.computed_at[name].append((plan.step, number))
            if samples:
                tokens.append(EOS if end + 1 - len(line.prompt) >= line.output and not line.known else 7)
        report.steps += 1
        report.rows += len(plan.slots)
        report.computed += int(plan.counts.sum())
        return StepResult(np.array(tokens, dtype=np.int32))

    def _take(self, output: StepOutput) -> None:
        report = self.report
        report.stats = output.stats
        for number, cached, finish in zip(output.request_ids, output.cached_tokens, output.finish, strict=True):
            report.hits[number] = report.hits.get(number, 0) + cached
            if finish:
                report.order.append(number)


def _hashes(prompt: list[int]) -> list[bytes]:
    """Return the hashes of a prompt's whole blocks."""
    names: list[bytes] = []
    for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
        names.append(hash_block(names[-1] if names else b"", prompt[end - BLOCK_SIZE : end]))
    return names
