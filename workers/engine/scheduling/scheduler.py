"""Decide, step by step, which requests get how many tokens.

There are no prefill and decode phases.
"""

import sys
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

from workers.engine.messages.core import EngineRequest, Finish, Stats, StepOutput, TokenLogprobs
from workers.engine.messages.metrics import KINDS
from workers.engine.messages.step import AddedRequest, NewBlocks, PromptScores, StepPlan, StepResult
from workers.engine.scheduling.forecast import AdmissionForecast
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.request import RequestState, refusal
from workers.engine.scheduling.step_builder import OutputBuilder, StepBuilder

_PRIORITY = attrgetter("priority")
_MAX_DEFERRED_STEPS = 32  # steps


class Scheduler:
    """Distributes a token budget in every step.

    Live requests come before batch requests, and within each class running requests before waiting
    ones.

    A request has known tokens and computed tokens, and a step computes some of the difference; at
    the last known token it samples the next. When blocks run out, the running request of the lowest
    priority is preempted: batch before live, then the highest priority number, then the newest. It
    keeps its tokens and waits for its turn. So the request of the highest priority always goes on,
    and none of equal priority starves.

    With `depth` 1, `schedule` may be called once more before `update` has delivered the tokens of
    the step before. Slots and blocks of a request that a launched step still uses then stay in use
    until that step is retired, and a token sampled for a request that had already ended is dropped.

    With `admission_batch` above 1 and few free slots or blocks, batch requests wait until that many
    slots and their share of the blocks are free, for at most `_MAX_DEFERRED_STEPS` steps. Prompts
    are then computed together in a few steps, which pays where steps without a prompt are much
    cheaper.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kv_cache: KVCache,
        depth: int,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        admission_batch: int = 1,
    ) -> None:
        """Lower `max_model_len` to what the cache can hold for a single request."""
        self.token_budget = max_num_batched_tokens
        self.max_model_len = min(max_model_len, kv_cache.max_tokens)
        self.depth = depth
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._forecast = AdmissionForecast(kv_cache, max_num_seqs, self.max_model_len)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._admission_batch = admission_batch
        self._admission_blocks = self._pool.num_blocks * admission_batch // max_num_seqs
        self._deferred_steps = 0
        self._requests: dict[int, RequestState] = {}
        self._live = _PriorityClass()
        self._batch = _PriorityClass()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._launched: deque[_Launched] = deque()
        self._returning: list[_Returning] = []
        self._returning_blocks = 0
        self._retired_step = 0
        self._arrivals = 0
        self._step = 0
        self._stats = Stats()
        self._output = OutputBuilder()
        self._fresh_hits: dict[
            int, int
        ] = {}  # prompt tokens that the cache gave, by request, until its first entry in an output
        self._fresh_scores: dict[
            int, list[TokenLogprobs]
        ] = {}  # what the prompt's log probabilities are so far, until the same moment

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Add a request.

        One that cannot run, or has nothing left to generate, ends at once and is part of the next
        output.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._arrivals += 1
        added = RequestState(request, self._arrivals, self.max_model_len, self._eos_token_ids)
        problem = refusal(added, self.max_model_len, self._vocab_size)
        finish, stop_token = (Finish.ERROR, -1) if problem else added.ended_by()
        if finish:
            added.finish = finish
            self._output.end(added, stop_token, problem)
        else:
            self._requests[added.id] = added
            if added.sampling.prompt_logprobs >= 0:
                self._fresh_scores[added.id] = []
            self._wait(added)

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests at once, in any state; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, Finish.ABORT)
                self._output.end(request, -1)

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None when nothing can be computed now.

        More may become possible once a launched step is retired.
        """
        if len(self._launched) > self.depth:
            raise RuntimeError(f"{len(self._launched)} steps are launched and not retired at depth {self.depth}")
        step = StepBuilder(self._step + 1, self.token_budget)
        for priority_class in (self._live, self._batch):
            self._advance(priority_class.running, step)
            if priority_class.waiting and not (priority_class is self._batch and self._defers_admission()):
                self._admit(priority_class, step)
        if not step.slots:
            return None
        self._step = step.number
        self._launched.append(_Launched(step.number, step.sampling, step.scored, step.first_entries))
        self._stats.steps += 1
        self._stats.computed_tokens += self.token_budget - step.budget
        return step.build()

    def undo(self, plan: StepPlan) -> list[int]:
        """Undo the step planned last, which could not be launched; return its request ids.

        The requests have the computed tokens of before, and those that it admitted wait again.
        Those that were preempted for it stay so.
        """
        launched = self._launched.pop()
        if launched.step != plan.step:
            raise RuntimeError(f"step {plan.step} was undone in place of step {launched.step}")
        by_slot = {
            request.slot: request for priority_class in (self._live, self._batch) for request in priority_class.running
        }
        requests = [by_slot[slot] for slot in plan.slots.tolist()]
        before = self._launched[-1].step if self._launched else self._retired_step
        for request, start, samples in zip(requests, plan.starts.tolist(), plan.samples.tolist(), strict=True):
            self._kv_cache.truncate(request, start)
            request.known -= samples
            request.last_step = before
        for scores in plan.prompt_scores:
            requests[scores.row].next_score = scores.first
        for request in launched.first_entries:
            request.cached_tokens = -1
            self._fresh_hits.pop(request.id, None)
        for added in plan.added:
            self._requeue(by_slot[added.slot])
        self._stats.steps -= 1
        self._stats.computed_tokens -= int(plan.counts.sum())
        return [request.id for request in requests]

    def fail(self, request_id: int, error: str) -> None:
        """End a request that cannot be computed; `error` is a sentence."""
        request = self._requests[request_id]
        self._end(request, Finish.ERROR)
        self._output.end(request, -1, error)

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Record the result of the oldest launched step; return all since the last output."""
        launched = self._launched.popleft()
        if launched.step != plan.step or len(launched.sampling) != len(result.tokens):
            raise RuntimeError(
                f"step {plan.step} with {len(result.tokens)} tokens was retired in place of step {launched.step}"
            )
        self._retired_step = plan.step
        self._take_back()
        output = self._output
        if result.logprobs or launched.scored:
            self._take_logprobs(launched, result)
        add_id, add_token = output.request_ids.append, output.token_ids.append
        for request, token in zip(launched.sampling, result.tokens.tolist(), strict=True):
            if request.finish:
                continue
            tokens = request.tokens
            tokens.append(token)
            if token in request.stop_token_ids or len(tokens) >= request.limit:
                finish, stop_token = request.ended_by()
                if finish:
                    self._end(request, finish)
                    output.end(request, stop_token, token=token)
                    continue
            add_id(request.id)
            add_token(token)
        self._stats.tokens += len(output.token_ids)
        return self._flush(launched.first_entries)

    def ended(self) -> StepOutput | None:
        """Return the requests that ended without a step since the last output, if any."""
        return self._flush() if self._output.request_ids else None

    def check_idle(self) -> None:
        """Raise RuntimeError when slots or blocks are in use without requests or launched steps."""
        if self._requests or self._launched:
            raise RuntimeError(f"not idle: {len(self._requests)} requests, {len(self._launched)} launched steps")
        self._pool.check()
        if self._pool.num_free != self._pool.num_blocks - 1 or self._returning or self._returning_blocks:
            raise RuntimeError(f"idle with {self._pool.num_blocks - 1 - self._pool.num_free} KV blocks in use")
        if self._pool.retain_counts():
            raise RuntimeError(f"idle with {len(self._pool.retain_counts())} KV blocks retained")
        if self._live.running or self._batch.running or self._live.waiting or self._batch.waiting:
            raise RuntimeError("idle with requests in a queue")
        self._forecast.check_empty()

    def _take_logprobs(self, launched: "_Launched", result: StepResult) -> None:
        for index, logprobs in result.logprobs.items():
            request = launched.sampling[index]
            if not request.finish:
                self._output.logprobs[request.id] = [logprobs]
        for request, scores in zip(launched.scored, result.prompt_logprobs, strict=True):
            if not request.finish:
                self._fresh_scores[request.id] += scores

    def _advance(self, requests: list[RequestState], step: StepBuilder) -> None:
        """Give requests with a slot as many of their uncomputed tokens as the budget has left.

        Every row of every step passes this loop: its cost per row is the host's cost of a step.
        """
        budget, number = step.budget, step.number
        add_slot, add_start, add_count, add_samples = (
            step.slots.append,
            step.starts.append,
            step.counts.append,
            step.samples.append,
        )
        add_sampling = step.sampling.append
        for request in requests:  # preemption shortens the list only behind the request at hand
            if not budget:
                break
            start, known = request.computed, request.known
            if known >= request.limit:
                continue  # its last token is in a launched step
            count = known - start
            if count > budget:
                count = budget
            end = start + count
            if end > request.capacity and not self._extend(request, end, step):
                continue
            budget -= count
            if end >= request.next_score:
                self._score(request, end, step)
            add_slot(request.slot)
            add_start(start)
            add_count(count)
            request.computed = end
            request.last_step = number
            if end == known:
                request.known = end + 1
                add_samples(1)
                add_sampling(request)
            else:
                add_samples(0)
                step.outstanding += self._kv_cache.blocks_for(known - request.capacity)
            if end >= request.hash_at:
                self._kv_cache.cache_blocks(request)
        step.budget = budget

    def _score(self, request: RequestState, end: int, step: StepBuilder) -> None:
        """Let the step's next row report the log probabilities of the prompt tokens after its own.

        Each is reported once, also when tokens are recomputed after a preemption.
        """
        last = min(end + 1, request.prompt_length)
        step.prompt_scores.append(PromptScores(len(step.slots), request.next_score, last))
        step.scored.append(request)
        request.next_score = last if last < request.prompt_length else sys.maxsize

    def _extend(self, request: RequestState, end: int, step: StepBuilder) -> bool:
        """Allocate blocks for a request's first `end` tokens; return False if it must wait.

        Requests of lower priority are preempted if need be.
        """
        if not self._make_room(self._kv_cache.blocks_for(end - request.capacity), request):
            step.short = True
            return False
        first = len(request.blocks)
        step.new_blocks.append(NewBlocks(request.slot, first, self._kv_cache.grow(request, end)))
        return True

    def _admit(self, priority_class: "_PriorityClass", step: StepBuilder) -> None:
        """Admit waiting requests in order of priority.

        Their known tokens must fit beside what the running requests may soon need.
        """
        while priority_class.waiting and step.budget and not step.short:
            request = priority_class.waiting[0]
            if request.known > len(request.tokens) or not self._slot_for(request, step):
                return
            reserve = step.outstanding + len(self._live.running) + (0 if request.live else len(self._batch.running))
            if not request.live and reserve >= self._pool.num_free:
                return
            # What the cache holds has no logits, so as long as prompt tokens are to be scored
            # everything is computed.
            prefix = self._kv_cache.find_prefix(request) if request.next_score == sys.maxsize else []
            need = self._kv_cache.blocks_for(request.known) - len(prefix) + self._pool.count_free(prefix) + reserve
            if need <= self._pool.num_free and (request.live or self._has_room(request, prefix, step)):
                self._enter(priority_class, request, prefix, step)
            elif not (request.live and self._make_room(need, request)):
                step.short = request.live and bool(self._returning)
                return

    def _has_room(self, request: RequestState, prefix: list[int], step: StepBuilder) -> bool:
        """Return whether a batch request is expected to fit until its end.

        A single request is admitted whenever it can begin.
        """
        if not self._batch.running:
            return True
        returning = sum(returning.own_blocks for returning in self._returning)
        return self._forecast.has_room(
            request, prefix, step.number, self._live.running + self._batch.running, returning
        )

    def _defers_admission(self) -> bool:
        """Return whether batch requests wait, so that later more of them are admitted at once."""
        scarce = len(self._free_slots) < self._admission_batch or self._pool.num_free < self._admission_blocks
        runs = self._live.running or self._batch.running
        if self._admission_batch > 1 and scarce and runs and self._deferred_steps < _MAX_DEFERRED_STEPS:
            self._deferred_steps += 1
            return True
        self._deferred_steps = 0
        return False

    def _enter(
        self, priority_class: "_PriorityClass", request: RequestState, prefix: list[int], step: StepBuilder
    ) -> None:
        del priority_class.waiting[0]
        revived = self._pool.count_free(prefix)
        self._kv_cache.admit(request, prefix)
        self._kv_cache.release(request)
        hit = request.computed
        request.slot = self._free_slots.pop()
        self._forecast.enter(request, step.number, revived)
        if request.cached_tokens < 0:
            step.first_entries.append(request)
            request.waited = time.monotonic() - request.arrived
            request.cached_tokens = min(hit, request.prompt_length)
            if request.cached_tokens:
                self._fresh_hits[request.id] = request.cached_tokens
        self._stats.prefix_hit_tokens += hit
        self._stats.recomputed_tokens += max(0, request.reached - hit)
        insort(priority_class.running, request, key=_PRIORITY)
        step.added.append(AddedRequest(request.slot, request.tokens.copy(), request.prompt_length, request.sampling))
        if prefix:
            step.new_blocks.append(NewBlocks(request.slot, 0, prefix.copy()))
        self._advance([request], step)

    def _slot_for(self, request: RequestState, step: StepBuilder) -> bool:
        """Return whether a slot is free.

        For live requests batch ones are preempted, as many at once as the step's budget can admit.
        """
        if request.live and not self._free_slots:
            wanted = sum(
                before < step.budget for before in accumulate((other.known for other in self._live.waiting), initial=0)
            )
            missing = min(wanted, len(self._live.waiting)) - len(self._returning)
            for _ in range(min(missing, len(self._batch.running))):
                self._preempt(self._batch.running[-1])
        return bool(self._free_slots)

    def _make_room(self, need: int, request: RequestState) -> bool:
        """Preempt requests of the lowest priority until `need` blocks are free.

        For a running request these are all behind it and at last itself; for a waiting live one,
        batch requests alone. Returns False when the blocks are not free now; they may be once a
        launched step is retired.
        """
        waits = request.slot < 0
        if (
            waits
            and self._pool.num_free + self._returning_blocks + sum(len(batch.blocks) for batch in self._batch.running)
            < need
        ):
            return False
        while self._pool.num_free < need:
            if self._pool.num_free + self._returning_blocks >= need:
                return False
            priority_class = self._batch if self._batch.running or waits else self._live
            if not priority_class.running:
                return False
            victim = priority_class.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: RequestState) -> None:
        self._class_of(victim).running.pop()
        victim.reached = max(victim.reached, victim.computed)
        self._wait(victim)
        self._give_up(victim)
        self._stats.preemptions += 1

    def _end(self, request: RequestState, finish: Finish) -> None:
        request.finish = finish
        del self._requests[request.id]
        self._forecast.lengths.learn(request)
        priority_class = self._class_of(request)
        queue = priority_class.running if request.slot >= 0 else priority_class.waiting
        del queue[bisect_left(queue, request.priority, key=_PRIORITY)]
        if request.slot >= 0:
            self._give_up(request)
        else:
            self._kv_cache.release(request)

    def _wait(self, request: RequestState) -> None:
        insort(self._class_of(request).waiting, request, key=_PRIORITY)
        if request.next_score == sys.maxsize:
            self._kv_cache.retain(request)

    def _give_up(self, request: RequestState) -> None:
        if request.computed >= request.hash_at:
            self._kv_cache.cache_blocks(request)
        self._forecast.leave(request)
        own_blocks = len(request.blocks) - request.shared
        self._returning.append(_Returning(request.last_step, request.slot, request.blocks, own_blocks, request.live))
        self._returning_blocks += len(request.blocks)
        request.leave()
        self._take_back()

    def _requeue(self, request: RequestState) -> None:
        """Return a request that no launched step contains to the waiting ones."""
        priority_class = self._class_of(request)
        del priority_class.running[bisect_left(priority_class.running, request.priority, key=_PRIORITY)]
        self._forecast.leave(request)
        self._stats.prefix_hit_tokens -= request.computed
        self._stats.recomputed_tokens -= max(0, request.reached - request.computed)
        self._wait(request)
        self._pool.free(request.blocks, request.live)
        self._free_slots.append(request.slot)
        request.leave()

    def _take_back(self) -> None:
        """Free the slots and blocks that no launched step uses any more."""
        due = [returning for returning in self._returning if returning.after <= self._retired_step]
        if not due:
            return
        self._returning = [returning for returning in self._returning if returning.after > self._retired_step]
        for returning in due:
            self._returning_blocks -= len(returning.blocks)
            self._pool.free(returning.blocks, returning.live)
            self._free_slots.append(returning.slot)

    def _class_of(self, request: RequestState) -> "_PriorityClass":
        return self._live if request.live else self._batch

    def _flush(self, entered: Collection[RequestState] = ()) -> StepOutput:
        """Return the output; `entered` were in the step that it is of for the first time."""
        for request in entered:
            if request.sampling.prompt_logprobs < 0:
                self._stats.prefix_queries += request.prompt_length
                self._stats.prefix_hits += request.cached_tokens
        stats = copy(self._stats)
        stats.queue_seconds = [(each.waited, KINDS[not each.live]) for each in entered if each.arrived]
        stats.running = len(self._live.running) + len(self._batch.running)
        stats.waiting = len(self._requests) - stats.running
        stats.free_blocks = self._pool.num_free
        output, self._output = self._output, OutputBuilder()
        return output.build(self._retired_step, self._fresh_hits, self._fresh_scores, stats)


@dataclass(slots=True)
class _PriorityClass:
    """The live or the batch requests, each list with the highest priority first."""

    running: list[RequestState] = field(default_factory=list)
    waiting: list[RequestState] = field(default_factory=list)


@dataclass(slots=True)
class _Launched:
    step: int
    sampling: list[RequestState]
    scored: list[RequestState]
    first_entries: list[RequestState]  # requests admitted for the first time


@dataclass(slots=True)
class _Returning:
    """A slot and blocks that are free once step `after` has been retired.

    `own_blocks`: how many of them no other request uses.
    """

    after: int
    slot: int
    blocks: list[int]
    own_blocks: int
    live: bool
