"""Thousands of random schedules against a device that keeps token ids where a real one keeps keys
and values.

The device does exactly what a plan says, so a wrong block, slot or count shows as a wrong context,
and a wrong context as wrong tokens.
"""

import math
import random
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.engine.scheduling.integrity import check_cache, check_idle
from workers.engine.guides.guide import Guide
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.cache_groups import CacheGroups, CacheRule, LayerCache, group_layers
from workers.engine.messages.core import (
    EngineRequest,
    Finish,
    LiveShare,
    OutputGuide,
    PoolingParams,
    SamplingParams,
    Stats,
    StepOutput,
    TokenLogprobs,
)
from workers.engine.messages.step import NOT_FINITE, PromptScores, StepPlan, StepResult
from workers.engine.scheduling.admission import PlainAdmission
from workers.engine.scheduling.hybrid_cache import HybridKVCache, make_cache
from workers.engine.scheduling.kv_cache import KVCache, hash_block
from workers.engine.scheduling.live_steps import ONE_PROMPT, live_steps_for
from workers.engine.scheduling.scheduler import Scheduler

VOCAB = 11
EOS = 7


def _window(tokens: int, token_bytes: int = 2) -> LayerCache:
    return LayerCache(CacheRule(tokens), token_bytes, (token_bytes,))


SHARES = [None, LiveShare("a", "1"), LiveShare("a", "2"), LiveShare("b", "3", 3.0), LiveShare("c", "4", 0.3)]
ALL = LayerCache(CacheRule(), 2, (2,))
MODELS: dict[str, list[LayerCache | None]] = {
    "one group": [ALL],
    "a window everywhere": [_window(3)],
    "local and global": [*[_window(5)] * 3, ALL],
    "a window of one token": [_window(1), ALL],
    "two windows": [_window(2), _window(9), ALL, ALL],
    "longer blocks in the window": [*[_window(4, 1)] * 2, ALL],
    "longer blocks beside the window": [_window(6, 4), _window(6, 4), ALL, ALL],
    "two shapes that keep all": [ALL, ALL, LayerCache(CacheRule(), 2, (3,))],
    "chunks": [LayerCache(CacheRule(chunk=6), 2, (2,)), ALL],
    "chunks everywhere": [LayerCache(CacheRule(chunk=5), 2, (2,))],
}
_TAG = 100  # times its column, added to each token that a page holds; more than any token id


def next_token(context: list[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCAB


def score(token: int, position: int) -> TokenLogprobs:
    """Return where it belongs."""
    return TokenLogprobs([token], [-float(position)], 1)


@dataclass(frozen=True)
class ScheduledCase:
    """A request, the step at which it comes, how much of its answer it brings, and the step at
    which it is aborted, if ever.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    live: bool
    forced: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    aborted: int | None
    priority: int = 0
    min_tokens: int = 0
    logprobs: bool = False
    prompt_logprobs: bool = False
    batch_id: str = ""
    share: LiveShare | None = None

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            logprobs=int(self.logprobs) - 1,
            prompt_logprobs=int(self.prompt_logprobs) - 1,
        )

    def answer(self, max_model_len: int) -> tuple[list[int], Finish]:
        tokens = list(self.prompt)
        limit = min(len(tokens) + self.max_tokens, max_model_len)
        while len(tokens) < limit:
            token = next_token(tokens)
            tokens.append(token)
            early = len(tokens) - len(self.prompt) <= self.min_tokens
            if not early and (token in self.stop_token_ids or (token == EOS and not self.ignore_eos)):
                return tokens[len(self.prompt) :], Finish.STOP
        return tokens[len(self.prompt) :], Finish.LENGTH


@dataclass(frozen=True)
class Setup:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    max_model_len: int
    depth: int
    prefix_caching: bool
    admission_batch: int = 1
    failures: int = 0  # seed of steps that cannot be launched, late masks and NaN; 0: none
    live_step: float = 0.15  # seconds, of a device that takes about a millisecond for a token
    # Requests come in without a look at how long they get, so that more are preempted
    crowded: bool = False
    # All requests pool, each in one step as those of a bidirectional model
    pools: bool = False
    whole: bool = False
    model: str = "one group"

    @property
    def groups(self) -> CacheGroups:
        return group_layers(MODELS[self.model], self.block_size)

    @property
    def num_pages(self) -> int:
        """Return fewer pages for each block of a model with many, so that some are scarce."""
        of_block = sum(group.pages for group in self.groups.groups)
        return 1 + max(of_block, (self.num_blocks - 1) * (1 + of_block) // 2)


class TokenDevice:
    """Token table and block tables by slot, and per page the token ids that a real cache would hold
    the keys and values of.
    """

    def __init__(self, setup: Setup) -> None:
        self.groups, self.max_model_len = setup.groups, setup.max_model_len
        self.pools, self.whole = setup.pools, setup.whole
        self.cache = np.full((setup.num_pages, self.groups.grid), -1)
        self.tokens: list[list[int]] = [[] for _ in range(setup.max_num_seqs)]
        # By slot and group: the pages of each block, and the first block
        self.tables: list[list[list[list[int]]]] = [[] for _ in range(setup.max_num_seqs)]
        self.firsts: list[list[int]] = [[] for _ in range(setup.max_num_seqs)]
        self.asking: list[SamplingParams] = [SamplingParams(0)] * setup.max_num_seqs
        self.unretired: deque[list[tuple[int, set[int]]]] = deque()  # by row: slot, and pages that it uses
        self.again: dict[int, int] = {}  # by slot, the token that is computed again after its sample was left out

    def launch(self, plan: StepPlan) -> StepResult:
        self._take_in(plan)
        rows = list(
            zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True)
        )
        assert len({slot for slot, *_ in rows}) == len(rows), "a slot has two rows in one step"
        self._check_writers(rows)
        for slot, start, count, _ in rows:
            assert start + count < self.max_model_len + self.pools, (
                "a token was computed that leaves no place for the one it samples"
            )
            self._write(slot, start, count, self.tokens[slot])
        self.unretired.append([(slot, self._read(slot, start, count)) for slot, start, count, _ in rows])
        scores = [self._score(rows[scores.row], scores) for scores in plan.prompt_scores]
        if self.whole:
            assert all(start == 0 and samples for _, start, _, samples in rows), "a text was cut"
        if self.pools:
            return StepResult(
                np.empty(0, dtype=np.int32),
                pooled=[bytes(self._context(slot, start + count)) for slot, start, count, samples in rows if samples],
            )
        sampled = [(slot, self._sample(slot, start + count)) for slot, start, count, samples in rows if samples]
        logprobs = {
            i: score(token, len(self.tokens[slot]) - 1)
            for i, (slot, token) in enumerate(sampled)
            if self.asking[slot].logprobs >= 0
        }
        return StepResult(np.array([token for _, token in sampled], dtype=np.int32), logprobs, scores)

    def fail(self, plan: StepPlan) -> None:
        """Do as much of a step as leaves all that it was to write in disorder, and nothing to be
        retired.
        """
        self._take_in(plan)
        rows = list(
            zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True)
        )
        self._check_writers(rows)
        for slot, start, count, _ in rows:
            self._write(slot, start, count, [-2] * (start + count))
            for table, first in zip(self.tables[slot], self.firsts[slot], strict=True):
                del table[max(0, -(-start // self.groups.grid) - first) :]

    def leave_out(self, slot: int) -> None:
        """Drop the last token of a slot, which the step launched last has sampled.

        So it does not matter what the row reads.
        """
        self.tokens[slot].pop()
        self.unretired[-1] = [(other, pages) for other, pages in self.unretired[-1] if other != slot]
        self.again[slot] = len(self.tokens[slot]) - 1

    def retire(self) -> None:
        self.unretired.popleft()

    def _take_in(self, plan: StepPlan) -> None:
        busy = {slot for step in self.unretired for slot, _ in step}
        for added in plan.added:
            assert added.slot not in busy, "a slot was filled again before the step that used it was retired"
            self.again.pop(added.slot, None)
            self.tokens[added.slot] = list(added.token_ids)
            self.tables[added.slot] = [[] for _ in self.groups.groups]
            self.firsts[added.slot] = [0] * len(self.groups.groups)
            self.asking[added.slot] = added.sampling
        for new in plan.new_blocks:
            table, pages = self.tables[new.slot][new.group], self.groups.groups[new.group].pages
            if not table:
                self.firsts[new.slot][new.group] = new.first
            assert new.first == self.firsts[new.slot][new.group] + len(table)
            assert 0 not in new.block_ids, "the null page was handed out"
            table += [new.block_ids[at : at + pages] for at in range(0, len(new.block_ids), pages)]

    def _places(self, slot: int, group: int, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each of the tokens, by column of the group, with its page and its place there."""
        size, grid, table = self.groups.groups[group].block_size, self.groups.grid, self.tables[slot][group]
        for position in range(start, end):
            pages = table[position // grid - self.firsts[slot][group]]
            for column in range(self.groups.groups[group].columns):
                yield position, column, pages[column * (grid // size) + position % grid // size], position % size

    def _write(self, slot: int, start: int, count: int, tokens: list[int]) -> None:
        for group in range(len(self.groups.groups)):
            for position, column, page, offset in self._places(slot, group, start, start + count):
                self.cache[page, offset] = tokens[position] + _TAG * (10 * group + column)

    def _read(self, slot: int, start: int, count: int) -> set[int]:
        """Check what a row reads; return the pages."""
        read = set()
        for group, each in enumerate(self.groups.groups):
            for position, column, page, offset in self._places(slot, group, each.rule.first_read(start), start + count):
                expected = self.tokens[slot][position] + _TAG * (10 * group + column)
                assert self.cache[page, offset] == expected, "the slot's blocks hold other tokens than its own"
                read.add(page)
        return read

    def _check_writers(self, rows: list[tuple[int, int, int, bool]]) -> None:
        written: dict[int, int] = {}
        for slot, start, count, _ in rows:
            for group in range(len(self.groups.groups)):
                for position, _, page, _ in self._places(slot, group, start, start + count):
                    if position != self.again.get(slot):
                        assert written.setdefault(page, slot) == slot, "two rows write one block in one step"
        for step in self.unretired:
            for slot, pages in step:
                for page in pages:
                    assert written.get(page, slot) == slot, (
                        "a block was handed on before the step that used it was retired"
                    )

    def _score(self, row: tuple[int, int, int, bool], scores: PromptScores) -> list[TokenLogprobs]:
        slot, start, count, _ = row
        assert self.asking[slot].prompt_logprobs >= 0
        assert start < scores.first < scores.last <= start + count + 1, (
            "a token was scored whose predecessor is not in the step"
        )
        return [score(self.tokens[slot][position], position) for position in range(scores.first, scores.last)]

    def _context(self, slot: int, end: int) -> list[int]:
        assert len(self.tokens[slot]) == end, "a row sampled before its last known token"
        return self.tokens[slot]

    def _sample(self, slot: int, end: int) -> int:
        context = self._context(slot, end)
        assert end < self.max_model_len, "a token was sampled past the end of the context"
        token = next_token(context)
        self.tokens[slot].append(token)
        return token


def kept_whole(groups: CacheGroups) -> CacheGroups:
    """Return groups that keep all, as those of a model with whole prompts do."""
    return replace(groups, groups=tuple(replace(group, rule=CacheRule()) for group in groups.groups))


@dataclass
class ScheduledRun:
    setup: Setup
    cases: list[ScheduledCase]
    got: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, Finish] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    spoiled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        setup = self.setup
        self.kv_cache = make_cache(
            setup.groups if not setup.whole else kept_whole(setup.groups),
            setup.num_pages,
            (setup.depth + 1) * setup.budget,
            enable_prefix_caching=setup.prefix_caching and not setup.whole,
        )
        self.scheduler = Scheduler(
            setup.max_num_seqs,
            setup.budget,
            setup.max_model_len,
            self.kv_cache,
            setup.depth,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            live_step_seconds=setup.live_step,
            admission_batch=setup.admission_batch,
            tasks=["embed"] if setup.pools else ["generate"],
            whole_prompts=setup.whole,
        )
        if setup.crowded:
            self.scheduler._queues._policy = PlainAdmission()
        self.device = TokenDevice(setup)
        self.stats = Stats()
        self.chance = random.Random(setup.failures)
        self.answers = [case.answer(self.scheduler.max_model_len) for case in self.cases]
        self.content = self._expected_content()

    def to_the_end(self) -> None:
        launched: deque[tuple[StepPlan, StepResult]] = deque()
        last = max((max(case.arrives, case.aborted or 0) for case in self.cases), default=0)
        limit = (3 if self.setup.failures else 1) * 40 + 20 * sum(
            len(case.prompt) + case.max_tokens for case in self.cases
        )
        turn = 0
        while turn <= last or self.scheduler.unfinished or launched:
            assert turn < last + limit, "a request starves"
            self._arrivals(turn)
            turn += 1
            self._go_on()
            limit_of_step, before = self._time_limit(), self._states()
            plan = self.scheduler.schedule()
            if plan is not None and self.setup.failures and self.chance.random() < 0.3:
                self._fail(plan)
                after = self._states()
                assert all(after[number] == state for number, state in before.items() if number in after)
                continue
            if plan is not None:
                alone = self.setup.whole and len(plan.counts) == 1
                assert 0 < plan.counts.sum() <= (self.setup.max_model_len if alone else self.setup.budget)
                if not alone:
                    self._check_time(plan, limit_of_step)
                left_out = self._leave_out(plan)
                launched.append((plan, self._spoil(self.device.launch(plan), plan)))
                for slot in left_out:
                    self.device.leave_out(slot)
                self._check_cached_content()
                self._check_pages_in_use()
            assert plan is not None or launched or not self.scheduler.unfinished, "requests are left and nothing moves"
            if launched and (plan is None or len(launched) > self.setup.depth):
                self.device.retire()
                self.scheduler.step_cost.record(
                    launched[0][0].starts, launched[0][0].counts, self._seconds(launched[0][0])
                )
                self._take(self.scheduler.update(*launched.popleft()))
            self._take(self.scheduler.ended())
            check_cache(self.scheduler)
            self._check_pages_in_use()
        check_idle(self.scheduler)

    def _leave_out(self, plan: StepPlan) -> list[int]:
        """Take samples back whose masks are late; return their slots."""
        late = []
        for request in self.scheduler._launched[-1].sampling:
            if self.setup.failures and not self.setup.pools and self.chance.random() < 0.1:
                late.append(Guide(OutputGuide(), Vocabulary([], VOCAB), None, []))
                late[-1].ready = True
                request.guide = late[-1]
                self.scheduler._guided += 1
        self.scheduler.leave_out(late)
        return [request.slot for request in self.scheduler._launched[-1].sampling if request.guide in late]

    def _go_on(self) -> None:
        """Let the requests whose samples were left out compute their last token again."""
        assert self.scheduler.release_held() is None
        for request in list(self.scheduler._requests.values()):
            if not request.held:
                self.scheduler._drop_guide(request)

    def _spoil(self, result: StepResult, plan: StepPlan) -> StepResult:
        """Let the numbers of a row be not finite, and with them its keys and values."""
        sampling = self.scheduler._launched[-1].sampling
        for index in range(len(result.tokens)):
            if self.setup.failures and sampling[index].guide is None and self.chance.random() < 0.02:
                result.tokens[index] = NOT_FINITE
                self.spoiled.add(sampling[index].id)
        return result

    def _states(self) -> dict[int, tuple[object, ...]]:
        """Return what undoing a step must restore of each running request."""
        states = {}
        for request in self.scheduler._queues.running:
            blocks = -(-request.computed // self.kv_cache.block_size)
            runs = [(run.first, run.blocks[: blocks - run.first]) for run in request.runs]
            states[request.id] = (request.slot, request.computed, request.known, request.blocks[:blocks], runs)
        return states

    def _check_pages_in_use(self) -> None:
        read = {page for step in self.device.unretired for _, pages in step for page in pages}
        kv_cache = self.kv_cache
        if isinstance(kv_cache, KVCache):
            free = {block for block in range(1, kv_cache.num_pages) if not kv_cache.pool.ref_counts[block]}
        else:
            assert isinstance(kv_cache, HybridKVCache)
            cached = [block for node in kv_cache.tree.nodes.values() for block in node.blocks if block is not None]
            free = {page for block in cached if not block.users for page in block.pages}.union(kv_cache.pool.unused)
        assert free.isdisjoint(read), "a page was freed that a launched step reads"

    def _seconds(self, plan: StepPlan) -> float:
        pairs = plan.counts @ (plan.starts + plan.counts / 2)
        return self.chance.uniform(0.8, 1.2) * float(4e-3 + 1e-3 * plan.counts.sum() + 1e-5 * pairs)

    def _time_limit(self) -> float:
        """Return how long the next step may take: for ever without live requests."""
        queues, cost = self.scheduler._queues, self.scheduler.step_cost
        self.decoding = {request.slot for request in queues.running if request.known - request.computed == 1}
        unfinished = sum(request.known - request.computed > 1 for request in queues.live.running)
        self.most_live_prompts = unfinished + len(queues.live.waiting)
        self.has_batch = bool(queues.batch.running or queues.batch.waiting)
        self.streams = self.decoding & {request.slot for request in queues.live.running}
        contexts = [request.computed for request in queues.running if request.slot in self.decoding]
        decode = cost.empty + cost.decode(len(contexts), sum(contexts))
        return max(self.setup.live_step, 1.15 * decode) if queues.live.running or queues.live.waiting else math.inf

    def _check_time(self, plan: StepPlan, limit: float) -> None:
        """The prediction is within the limit, but for what has to go on: a row, or a few tokens."""
        cost, longest = self.scheduler.step_cost, self.setup.max_model_len
        predicted, added = cost.empty, {added.slot for added in plan.added}
        for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            decodes = slot in self.decoding and slot not in added
            predicted += cost.decode(1, start) if decodes else cost.prompt(start, count)
        live = {request.slot for request in self.scheduler._queues.live.running}
        if not live.isdisjoint({*plan.slots.tolist()} - (self.decoding - added)):
            live_steps = ONE_PROMPT if self.has_batch else live_steps_for(self.most_live_prompts)
            limit = max(limit, live_steps * self.setup.live_step)
        if (self.streams - added).isdisjoint(plan.slots.tolist()):
            limit = max(limit, 3 * cost.empty)
        tolerance = cost.decode(1, longest) + 2 * cost.prompt(longest, 4)
        assert predicted <= limit + tolerance, "a step beside live requests takes too long"

    def _fail(self, plan: StepPlan) -> None:
        self.device.fail(plan)
        self.scheduler.undo(plan)
        self.scheduler.token_budget = self.chance.randint(1, self.setup.budget)
        check_cache(self.scheduler)
        self._check_cached_content()

    def _arrivals(self, turn: int) -> None:
        for number, case in enumerate(self.cases):
            if case.arrives == turn:
                forced = [] if self.setup.pools else self.answers[number][0][: case.forced]
                self.got[number] = list(forced)
                self.scheduler.add(
                    EngineRequest(
                        number,
                        list(case.prompt),
                        list(forced),
                        case.sampling(),
                        case.live,
                        case.priority,
                        case.batch_id,
                        pooling=PoolingParams("embed") if self.setup.pools else None,
                        share=case.share,
                    )
                )
        self.scheduler.abort([number for number, case in enumerate(self.cases) if case.aborted == turn])

    def _take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        at, self.stats = 0, output.stats
        for row, number in enumerate(output.request_ids):
            assert number not in self.finish, "something came after the end"
            count = output.counts[row]
            self._check_logprobs(output, number, output.token_ids[at : at + count])
            assert 0 <= output.cached_tokens[row] <= (0 if number in self.seen else len(self.cases[number].prompt))
            self.seen.add(number)
            self.got[number] += output.token_ids[at : at + count]
            at += count
            if number in output.pooled:
                assert (count, output.finish[row]) == (0, Finish.STOP)
                self.got[number] = list(output.pooled[number])
            elif output.finish[row]:
                assert not self.setup.pools or output.finish[row] in (Finish.ERROR, Finish.ABORT)
            if output.finish[row]:
                self.finish[number] = Finish(output.finish[row])
                if output.finish[row] == Finish.STOP and not self.setup.pools:
                    assert output.stop_token[row] == self.got[number][-1]
        assert at == len(output.token_ids)

    def _check_logprobs(self, output: StepOutput, number: int, tokens: list[int]) -> None:
        """Those of the prompt come whole and once, with the first token of the request; those of
        the output with each token.
        """
        case = self.cases[number]
        position = len(case.prompt) + len(self.got[number])
        expected = [score(token, position + i) for i, token in enumerate(tokens)]
        assert output.logprobs.get(number, []) == (expected if case.logprobs else [])
        first = case.prompt_logprobs and tokens and number not in self.seen
        whole = [score(token, at) for at, token in enumerate(case.prompt)][1:]
        assert output.prompt_logprobs.get(number) == (whole if first else None)

    def _expected_content(self) -> dict[bytes, list[int]]:
        content, size = {}, self.setup.groups.grid
        for case, (answer, _) in zip(self.cases, self.answers, strict=True):
            tokens, name = [*case.prompt, *answer], b""
            for end in range(size, len(tokens) + 1, size):
                name = hash_block(name, tokens[end - size : end])
                content[name] = tokens[end - size : end]
        return content

    def _check_cached_content(self) -> None:
        for name, group, pages in self._cached():
            size = self.device.groups.groups[group].block_size
            for index, page in enumerate(pages):
                column, part = divmod(index, self.device.groups.grid // size)
                held = self.device.cache[page, :size] - _TAG * (10 * group + column)
                assert held.tolist() == self.content[name][part * size : (part + 1) * size], (
                    "a cached block holds other tokens than its hash says"
                )

    def _cached(self) -> Iterator[tuple[bytes, int, list[int]]]:
        """Yield each cached block: its hash, group and pages."""
        if isinstance(self.kv_cache, KVCache):
            yield from ((name, 0, [block]) for name, block in self.kv_cache.pool.cached.items())
        elif isinstance(self.kv_cache, HybridKVCache):
            for name, node in self.kv_cache.tree.nodes.items():
                for block in (*node.blocks, *node.copies):
                    if block is not None:
                        yield name, block.group, block.pages


SETUPS = st.builds(
    Setup,
    block_size=st.integers(1, 4),
    num_blocks=st.integers(3, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 14),
    max_model_len=st.integers(4, 40),
    depth=st.integers(0, 1),
    prefix_caching=st.booleans(),
    admission_batch=st.sampled_from([1, 1, 2, 4]),
    failures=st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
    live_step=st.sampled_from([0.15, 0.02, 0.01, 0.006]),
    crowded=st.booleans(),
    model=st.sampled_from(list(MODELS)),
)
POOLING_SETUPS = st.builds(
    lambda setup, whole: replace(setup, pools=True, whole=whole, crowded=False), SETUPS, st.booleans()
)
PROMPTS = st.builds(
    lambda shared, own: (*shared, *own),
    st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 8, 9, 10), (0,) * 12]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8).map(tuple),
)
CASES = st.builds(
    ScheduledCase,
    prompt=PROMPTS,
    max_tokens=st.integers(0, 16),
    arrives=st.integers(0, 12),
    live=st.sampled_from([False, False, True]),
    forced=st.sampled_from([0, 0, 0, 1, 3, 16]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (2,), (3, 5)]),
    aborted=st.one_of(st.none(), st.none(), st.integers(0, 30)),
    priority=st.sampled_from([0, 0, -3, 1]),
    min_tokens=st.sampled_from([0, 0, 1, 6]),
    logprobs=st.booleans(),
    prompt_logprobs=st.sampled_from([False, False, True]),
    batch_id=st.sampled_from(["", "a", "b"]),
    share=st.sampled_from(SHARES),
)


def check(setup: Setup, cases: list[ScheduledCase]) -> ScheduledRun:
    run = ScheduledRun(setup, cases)
    run.to_the_end()
    for number, case in enumerate(cases):
        answer, finish = run.answers[number]
        if len(case.prompt) >= run.scheduler.max_model_len:
            assert run.finish[number] is Finish.ERROR
        elif run.finish[number] is Finish.ABORT:
            assert case.aborted is not None
            assert run.got[number] == answer[: len(run.got[number])]
        elif run.finish[number] is Finish.NOT_FINITE:
            assert number in run.spoiled
            assert run.got[number] == answer[: len(run.got[number])]
        else:
            assert (run.got[number], run.finish[number]) == (answer, finish)
    return run


@settings(max_examples=350, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(setup=SETUPS, cases=st.lists(CASES, max_size=9))
def test_any_schedule_gives_every_request_its_own_answer(setup: Setup, cases: list[ScheduledCase]) -> None:
    check(setup, cases)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(setup=POOLING_SETUPS, cases=st.lists(CASES, max_size=9))
def test_any_schedule_pools_every_text_once(setup: Setup, cases: list[ScheduledCase]) -> None:
    run = ScheduledRun(setup, [replace(case, logprobs=False, prompt_logprobs=False) for case in cases])
    run.to_the_end()
    for number, case in enumerate(cases):
        if len(case.prompt) > run.scheduler.max_model_len:
            assert run.finish[number] is Finish.ERROR
        elif run.finish[number] is Finish.ABORT:
            assert case.aborted is not None
        else:
            assert (run.got[number], run.finish[number]) == (list(case.prompt), Finish.STOP)


def random_setup(draw: random.Random) -> Setup:
    return Setup(
        block_size=draw.randint(1, 5),
        num_blocks=draw.randint(3, 40),
        max_num_seqs=draw.randint(1, 8),
        budget=draw.randint(1, 24),
        max_model_len=draw.randint(4, 60),
        depth=draw.randint(0, 1),
        prefix_caching=draw.random() < 0.7,
        admission_batch=draw.choice([1, 1, 2, 4]),
        failures=draw.choice([0, draw.randrange(1, 1000)]),
        live_step=draw.choice([0.15, 0.02, 0.01, 0.006]),
        crowded=draw.random() < 0.5,
        model=draw.choice(list(MODELS)),
    )


def random_case(draw: random.Random) -> ScheduledCase:
    shared = draw.choice([(), tuple(range(4)), tuple(range(9)), (0,) * 12])
    return ScheduledCase(
        prompt=(*shared, *draw.choices(range(VOCAB), k=draw.randint(1, 12))),
        max_tokens=draw.randint(0, 24),
        arrives=draw.randint(0, 20),
        live=draw.random() < 0.3,
        forced=draw.choice([0, 0, 0, 1, 5, 24]),
        ignore_eos=draw.random() < 0.7,
        stop_token_ids=draw.choice([(), (), (2,), (3, 5)]),
        aborted=draw.choice([None, None, draw.randint(0, 40)]),
        priority=draw.choice([0, 0, -3, 1]),
        min_tokens=draw.choice([0, 0, 1, 6]),
        logprobs=draw.random() < 0.5,
        prompt_logprobs=draw.random() < 0.3,
        batch_id=draw.choice(["", "a", "b"]),
        share=draw.choice(SHARES),
    )


@pytest.mark.proof
def test_many_more_schedules_without_shrinking() -> None:
    """Larger schedules, drawn plainly, since drawing is most of what hypothesis does here; a
    failing one is named by its seed.
    """
    for seed in range(6_000):
        draw = random.Random(seed)
        setup, cases = random_setup(draw), [random_case(draw) for _ in range(draw.randint(1, 16))]
        try:
            check(setup, cases)
        except (AssertionError, RuntimeError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {setup}, {cases}") from error


@pytest.mark.parametrize("depth", [0, 1])
def test_the_schedules_exercise_what_they_should(depth: int) -> None:
    """Preemption, prefix hits and slot shortage do occur in schedules like the ones above."""
    cases = [
        ScheduledCase((1, 2, 3, 4, 5, number), 14, number, number % 3 == 2, 0, True, (), None) for number in range(8)
    ]
    run = check(Setup(2, 16, 4, 6, 40, depth, True, crowded=True), cases)
    assert run.stats.preemptions > 0
    assert run.stats.prefix_hit_tokens > 0
