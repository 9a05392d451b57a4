"""Decide, step by step, which requests get how many tokens.

There are no prefill and decode phases. A request has known tokens and computed tokens. A step
computes some of the difference, and at the last known token it samples the next.

Read a step in this order:

1. `schedule` makes it, under one token budget.
2. `StepPlanner` (`step_planner.py`) gives tokens and blocks to the running requests, then lets
   waiting ones start: live requests first, then batch requests.
3. While a live request runs or waits, the step's time has a limit too (`live_steps.py`).
4. `RequestQueues` (`queues.py`) preempts requests if slots or blocks run out. Their slots and
   blocks become free once the last launched step that uses them has been retired (`slots.py`).
5. `update` retires the oldest launched step: its tokens become known, and some requests end.
   `undo` is for a step that could not be launched.

A pooling request runs like one that samples a single token, and returns its model's numbers.

A request with a guide (`guides/`) samples under a mask. `schedule` names its samples, `update`
advances the guide, and the request ends where the guide says so. A request whose guide is late is
held: its token does not count, and no step is planned for it, until the guide is ready.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from copy import copy
from itertools import chain

import numpy as np

from workers.engine.guides.guide import ALL_EXCLUDED_BY_GRAMMAR, Guide
from workers.engine.guides.guide_threads import GuideThreads
from workers.engine.messages.core import EngineRequest, Finish, Stats, StepOutput, TokenLogprobs
from workers.engine.messages.metrics import KINDS
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.admission import AdmissionBatching, AdmissionPolicy, PlainAdmission, choose_policy
from workers.engine.scheduling.cache import SchedulerCache
from workers.engine.scheduling.queues import RequestQueues
from workers.engine.scheduling.request import RequestState, refusal
from workers.engine.scheduling.slots import SlotPool
from workers.engine.scheduling.step_builder import OutputBuilder, StepBuilder
from workers.engine.scheduling.step_cost import StepCost
from workers.engine.scheduling.step_planner import StepPlanner
from workers.engine.scheduling.unusable import unusable


class Scheduler:
    """Distributes a token budget in every step.

    With `depth` 1, `schedule` may be called once more before `update` has delivered the tokens of
    the step before. A token sampled for a request that had already ended is dropped.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kv_cache: SchedulerCache,
        depth: int,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        live_step_seconds: float,
        admission_batch: int = 1,
        tasks: Collection[str] = ("generate",),
        whole_prompts: bool = False,
        guide_threads: GuideThreads | None = None,
    ) -> None:
        """Lower `max_model_len` to the tokens that the cache can hold for a single request.

        `tasks` are the supported tasks of requests. With `whole_prompts` each prompt is computed in
        one step, which may then exceed the token budget.

        `live_step_seconds` is the time limit of a step while a live request runs or waits, as
        predicted by `step_cost`. `admission_batch` is the size of `AdmissionBatching`.
        """
        self.token_budget = max_num_batched_tokens
        self.max_model_len = min(max_model_len, kv_cache.max_tokens)
        self.depth = depth
        self._kv_cache = kv_cache
        self._stats = Stats()
        self._slots = SlotPool(max_num_seqs, kv_cache)
        self.admission: AdmissionPolicy = (
            choose_policy(kv_cache, max_num_seqs, self.max_model_len) if "generate" in tasks else PlainAdmission()
        )
        self._queues = RequestQueues(kv_cache, self._slots, self.admission, self._stats)
        self.step_cost = StepCost()
        batching = AdmissionBatching(admission_batch, kv_cache.num_pages * admission_batch // max_num_seqs)
        self._planner = StepPlanner(
            kv_cache, self._slots, self._queues, batching, self.step_cost, live_step_seconds, whole_prompts
        )
        self._tasks = tasks
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[int, RequestState] = {}
        self._guided = 0  # number of requests with a guide
        self._guide_threads = guide_threads or GuideThreads(1)
        self._held: list[RequestState] = []
        self.forget_grammar: Callable[[str], None] = lambda grammar: None
        """Called with a grammar that could not be followed."""
        self._ending_by_text = 0  # number of requests with stop strings
        self._launched: deque[StepBuilder] = deque()
        self._live_step_seconds = live_step_seconds
        self._takes_long = False  # of the step planned last
        self._serves_live = False  # whether any live request has arrived
        self._arrivals = 0
        self._step = 0
        self._output = OutputBuilder()

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens the cache holds of requests of the longest context."""
        longest = float(self._kv_cache.pages_at(np.array([float(self.max_model_len)]))[0])
        return int(self._kv_cache.num_pages * self.max_model_len / longest)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included, if all groups had as many."""
        return 1 + (self._kv_cache.num_pages - 1) // self._kv_cache.block_pages

    @property
    def block_size(self) -> int:
        """Return the tokens of a block, which is that of all layers."""
        return self._kv_cache.block_size

    @property
    def unfinished(self) -> int:
        """Return how many requests run or wait."""
        return len(self._requests)

    @property
    def has_live(self) -> bool:
        """Return whether a live request runs or waits."""
        return self._queues.has_live

    @property
    def held(self) -> list[Guide]:
        """Return the guides that are late."""
        return [request.guide for request in self._held if request.guide is not None]

    def expect_live(self, expected: bool) -> None:
        """Set whether a live request waits elsewhere; if so, steps are kept short."""
        self._queues.expects_live = expected

    def add(self, request: EngineRequest, guide: Guide | None = None) -> None:
        """Add a request; one that cannot run, or has nothing left to generate, ends at once.

        `guide` has already been advanced by the tokens generated before.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._arrivals += 1
        self._serves_live = self._serves_live or request.live
        added = RequestState(request, self._arrivals, self.max_model_len, self._eos_token_ids)
        problem = refusal(added, self.max_model_len, self._vocab_size, self._tasks)
        finish, stop_token = (Finish.ERROR, -1) if problem else added.ended_by()
        if guide is not None and guide.complete and not problem:
            finish = Finish.STOP
        if finish:
            added.finish = finish
            self._output.end(added, stop_token, problem)
        else:
            self._requests[added.id] = added
            self._ending_by_text += added.stop_strings
            if guide is not None and not guide.finished:
                added.guide = guide
                self._guided += 1
            if added.sampling.prompt_logprobs >= 0:
                self._output.fresh_scores[added.id] = []
            self._queues.add(added)

    def refuse(self, request: EngineRequest, finish: Finish, error: str = "") -> None:
        """End a request that has not been added."""
        refused = RequestState(request, self._arrivals, self.max_model_len, self._eos_token_ids)
        refused.finish = finish
        self._output.end(refused, -1, error)

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests at once, in any state; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, Finish.ABORT)

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed now.

        More may become possible once a launched step is retired. After the first live request, no
        step is planned behind one that takes longer than a live step, since a new live request
        would wait for both. The device then idles between steps for a small part of their time.
        """
        if len(self._launched) > self.depth:
            raise RuntimeError(f"{len(self._launched)} steps are launched and not retired at depth {self.depth}")
        if self._launched and self._takes_long:
            return None
        step = StepBuilder(self._step + 1, self.token_budget)
        self._planner.plan(step)
        self._note_entries(step)
        if not step.slots:
            return None
        self._step = step.number
        self._launched.append(step)
        self._stats.steps += 1
        plan = step.build()
        self._stats.computed_tokens += int(plan.counts.sum())
        behind = self.depth > 0 and self._serves_live  # whether a live request may wait behind it
        self._takes_long = behind and self.step_cost.known and self.seconds_beyond_live_step(plan) > 0
        if self._guided:
            plan.guided = [index for index, request in enumerate(step.sampling) if request.guide is not None]
            self._hold_slow(plan)
        return plan

    def predict(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step."""
        return self.step_cost.predict(plan.starts, plan.counts)

    def seconds_beyond_live_step(self, plan: StepPlan) -> float:
        """Return by how much the predicted time exceeds a live step; negative if it does not."""
        return self.predict(plan) - self._live_step_seconds

    def _note_entries(self, step: StepBuilder) -> None:
        for request, now, first in step.entries:
            self._output.start(request, step.number, now)
            if first and request.cached_tokens:
                self._output.fresh_hits[request.id] = request.cached_tokens

    def guided(self, plan: StepPlan) -> list[RequestState]:
        """Return the requests of the guided samples in the step planned last, in order."""
        sampling = self._launched[-1].sampling
        return [sampling[index] for index in plan.guided]

    def leave_out(self, late: Collection[Guide]) -> None:
        """Take back the samples of the step planned last whose masks are late; hold their requests.

        These requests compute their last token once more in a later step.
        """
        step = self._launched[-1]
        for request in step.sampling:
            if request.guide in late and not request.finish:
                step.left_out.add(request.id)
                request.known -= 1
                self._kv_cache.step_back(request)
                self._hold(request)

    def _hold_slow(self, plan: StepPlan) -> None:
        """Hold the requests with slow guides, so that no step is planned before their masks."""
        for request in self.guided(plan):
            if request.guide is not None and request.guide.slow:
                self._hold(request)

    def _hold(self, request: RequestState) -> None:
        if not request.held and request.guide is not None:
            request.held = request.guide.awaited = True
            self._held.append(request)

    def release_held(self) -> StepOutput | None:
        """Let the requests go on whose guides are ready; return their tokens, if there are any."""
        held, self._held = self._held, []
        for request in held:
            guide = request.guide
            if request.finish or guide is None:
                request.held = False
                continue
            if guide.ready and request.postponed is not None:
                self._record_postponed(request, guide, *request.postponed)
            if not guide.ready or request.known > len(request.tokens):
                self._held.append(request)
            else:
                request.held = guide.awaited = False
                if request.computed >= request.release_at:  # not counted before its token was recorded
                    self._kv_cache.free_old_blocks(request, request.computed, request.last_step)
        return self.ended() if self._output.token_ids else None

    def _record_postponed(
        self, request: RequestState, guide: Guide, token: int, logprobs: list[TokenLogprobs] | None
    ) -> None:
        request.postponed = None
        if logprobs is not None:
            self._output.logprobs[request.id] = logprobs
        self._settle(request, guide, token)
        self._record_tokens([(request, token)])

    def undo(self, plan: StepPlan) -> list[int]:
        """Undo the step planned last, which could not be launched; return its request ids.

        The requests get back their computed tokens, and admitted ones wait again. Requests
        preempted for the step stay preempted, and those that have ended since are left out.
        """
        undone = self._launched.pop()
        if undone.number != plan.step:
            raise RuntimeError(f"step {plan.step} was undone in place of step {undone.number}")
        by_slot = {request.slot: request for request in self._queues.running}
        before = self._launched[-1].number if self._launched else self._slots.retired_step
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.samples.tolist(), strict=True)
        requests = []
        for slot, start, samples in rows:
            request = by_slot.get(slot)
            if request is not None:
                self._kv_cache.truncate(request, start)
                request.known -= samples * (request.id not in undone.left_out)
                request.last_step = before
                requests.append(request)
        for scores, request in zip(plan.prompt_scores, undone.scored, strict=True):
            request.next_score = scores.first
        for request in undone.first_entries:
            request.cached_tokens = -1
            self._output.fresh_hits.pop(request.id, None)
        for added in plan.added:
            if added.slot in by_slot:
                self._output.undo_start(by_slot[added.slot])
                self._queues.undo_enter(by_slot[added.slot])
        self._slots.undo(plan.step, before)
        self._stats.steps -= 1
        self._stats.computed_tokens -= int(plan.counts.sum())
        return [request.id for request in requests]

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Divide the device time of a step, before `update`, among its requests by their tokens."""
        self._slots.charge(plan, seconds)

    def fail(self, request_id: int, error: str) -> None:
        """End a request that cannot be computed; `error` is a sentence."""
        self._end(self._requests[request_id], Finish.ERROR, error=error)

    def fail_guided(self, plan: StepPlan) -> None:
        """End the requests of the step planned last whose guides have failed."""
        for request in self.guided(plan):
            if request.guide is not None and request.guide.ready and request.guide.mask_error:
                # The guide may have become ready after its last token was postponed
                token, logprobs = request.postponed or (None, None)
                request.postponed = None
                self._fail_guided(request, request.guide.mask_error, token, logprobs)

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Record the result of the oldest launched step; return everything since the last
        output.
        """
        launched = self._launched.popleft()
        results = len(result.tokens) + len(result.pooled)
        if launched.number != plan.step or len(launched.sampling) != results:
            raise RuntimeError(
                f"step {plan.step} with {results} results was retired in place of step {launched.number}"
            )
        self._slots.retire(plan.step)
        output = self._output
        if result.logprobs or launched.scored:
            output.take_logprobs(launched, result)
        self._fail_unusable(launched, result)
        if plan.guided:
            self._advance_guides(plan, launched, result)
        for request, pooled in zip(launched.sampling, result.pooled, strict=False):
            if not request.finish:
                output.pooled[request.id] = pooled
                self._end(request, Finish.STOP)
        sampled: Iterable[tuple[RequestState, int]] = zip(launched.sampling, result.tokens.tolist(), strict=False)
        if launched.left_out or self._held:
            uncounted = launched.left_out.union(request.id for request in self._held if request.postponed is not None)
            sampled = [(request, token) for request, token in sampled if request.id not in uncounted]
        self._record_tokens(sampled)
        if self._kv_cache.frees_old_blocks:
            self._free_old_blocks(plan, launched)
        self._report_device_seconds(launched)
        return self._flush(launched.first_entries)

    def _record_tokens(self, sampled: Iterable[tuple[RequestState, int]]) -> None:
        """Add a step's tokens to its requests and to the output."""
        add_id, add_token = self._output.request_ids.append, self._output.token_ids.append
        for request, token in sampled:
            if request.finish:
                continue
            tokens = request.tokens
            tokens.append(token)
            if token in request.stop_token_ids or len(tokens) >= request.limit:
                finish, stop_token = request.ended_by()
                if finish:
                    self._end(request, finish, stop_token, token=token)
                    continue
            add_id(request.id)
            add_token(token)

    def _free_old_blocks(self, plan: StepPlan, launched: StepBuilder) -> None:
        """Free the blocks that the requests of a retired step have left behind."""
        ends, samples = plan.starts + plan.counts, plan.samples > 0
        rows = chain(
            zip(launched.sampling, ends[samples].tolist(), strict=True),
            zip(launched.unsampled, ends[~samples].tolist(), strict=True),
        )
        for request, end in rows:
            if end >= request.release_at:
                self._kv_cache.free_old_blocks(request, end, launched.number)

    def ended(self) -> StepOutput | None:
        """Return the requests that ended without a step since the last output, if any."""
        return self._flush() if self._output.request_ids else None

    def _report_device_seconds(self, launched: StepBuilder) -> None:
        """Report the device time so far of requests that the worker process may end by their
        text.
        """
        if self._ending_by_text:
            going_on = [request for request in launched.sampling if request.stop_strings and not request.finish]
            self._output.device_seconds.update(self._slots.seconds_so_far(going_on))

    def _fail_unusable(self, launched: StepBuilder, result: StepResult) -> None:
        """End the requests that cannot go on.

        If a model's numbers are not finite, neither may be those of its keys and values.
        """
        for request, finish, error in unusable(launched, result):
            if not request.finish:
                self._output.logprobs.pop(request.id, None)
                if finish is Finish.NOT_FINITE:
                    self._kv_cache.forget(request)
                self._end(request, finish, error=error)

    def _advance_guides(self, plan: StepPlan, launched: StepBuilder, result: StepResult) -> None:
        """Pass the tokens of guided samples to their guides.

        A request whose guide allows no further token ends with its last token. A request is held
        if its guide does not know so soon.
        """
        drawn: list[tuple[RequestState, Guide, int]] = []
        for index in plan.guided:
            request, token = launched.sampling[index], int(result.tokens[index])
            if request.finish or request.guide is None or request.id in launched.left_out:
                continue
            if token < 0:
                self._fail_guided(request, ALL_EXCLUDED_BY_GRAMMAR)
            else:
                drawn.append((request, request.guide, token))
        self._guide_threads.follow([(guide, token) for _, guide, token in drawn])
        for request, guide, token in drawn:
            if guide.advanced:
                self._settle(request, guide, token)
            else:
                request.postponed = token, self._output.logprobs.pop(request.id, None)
                self._hold(request)

    def _settle(self, request: RequestState, guide: Guide, token: int) -> None:
        """End a request if its guide says so, with a token that it has not got yet."""
        if guide.error:
            self._fail_guided(request, guide.error)
        elif guide.complete:
            request.tokens.append(token)
            self._end(request, Finish.STOP, token=token)
        elif guide.finished:
            self._drop_guide(request)

    def _fail_guided(
        self,
        request: RequestState,
        error: str,
        token: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """End a request whose guide failed, with a token that it has not got yet, if there is
        one.
        """
        if request.guide is not None and error != ALL_EXCLUDED_BY_GRAMMAR:
            self.forget_grammar(request.guide.grammar)
        self._output.logprobs.pop(request.id, None)
        if token is not None:
            request.tokens.append(token)
        if logprobs is not None:
            self._output.logprobs[request.id] = logprobs
        self._end(request, Finish.INVALID, error=error, token=token)

    def _drop_guide(self, request: RequestState) -> None:
        if request.guide is not None:
            self._guided -= 1
            request.guide.dropped = True
            request.guide = None

    def _end(
        self, request: RequestState, finish: Finish, stop_token: int = -1, *, error: str = "", token: int | None = None
    ) -> None:
        request.finish = finish
        self._drop_guide(request)
        self._ending_by_text -= request.stop_strings
        del self._requests[request.id]
        self._queues.end(request)
        self._output.end(request, stop_token, error, token)

    def _flush(self, entered: Collection[RequestState] = ()) -> StepOutput:
        """Return the output; `entered` are the requests that its step has for the first time."""
        for request in entered:
            if request.sampling.prompt_logprobs < 0:
                self._stats.prefix_queries += request.prompt_length
                self._stats.prefix_hits += request.cached_tokens
        self._stats.tokens += len(self._output.token_ids)
        stats = copy(self._stats)
        stats.queue_seconds = [(each.waited, KINDS[not each.live]) for each in entered if each.arrived]
        stats.running = len(self._queues.live.running) + len(self._queues.batch.running)
        stats.waiting = len(self._requests) - stats.running
        stats.free_blocks = self._kv_cache.pool.num_free // self._kv_cache.block_pages
        output, self._output = self._output, self._output.following()
        return output.build(self._slots.retired_step, stats)
