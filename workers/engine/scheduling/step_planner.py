"""Fill a step: continue running requests, start waiting ones, and assign tokens to each.

A batch request does not start merely because its first tokens fit: the admission policy decides
(`admission.py`).
"""

import math
import sys
import time
from collections.abc import Iterable

from workers.engine.messages.step import AddedRequest, PromptScores
from workers.engine.scheduling.admission import AdmissionBatching
from workers.engine.scheduling.cache import Prefix, SchedulerCache
from workers.engine.scheduling.live_steps import LiveStepTime, decoding, in_prompt
from workers.engine.scheduling.queues import PriorityClass, RequestQueues
from workers.engine.scheduling.request import RequestState
from workers.engine.scheduling.slots import SlotPool
from workers.engine.scheduling.step_builder import SlotEntry, StepBuilder
from workers.engine.scheduling.step_cost import StepCost


class StepPlanner:
    """Assign the tokens of steps to requests."""

    def __init__(
        self,
        kv_cache: SchedulerCache,
        slots: SlotPool,
        queues: RequestQueues,
        batching: AdmissionBatching,
        cost: StepCost,
        live_step_seconds: float,
        whole_prompts: bool = False,
    ) -> None:
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._slots = slots
        self._queues = queues
        self._batching = batching
        self._cost = cost
        self._live_step_seconds = live_step_seconds
        self._whole_prompts = whole_prompts
        self._time: LiveStepTime | None = None  # of the step under planning, if it is limited
        self._saved_tokens = 0  # of the batch's share, for a whole prompt longer than the share

    def plan(self, step: StepBuilder) -> None:
        """Fill the step."""
        queues, self._time = self._queues, None
        if queues.has_live:
            self._plan_live(step)
        else:
            self._advance(queues.batch.running, step)
        self._admit_batch(step)

    def _plan_live(self, step: StepBuilder) -> None:
        """Advance the running requests, and start live ones, in a step with a time limit.

        Live requests come first, then batch requests; in each class, decoding requests come first.
        A prompt of a tenant that has less than its share does not wait for longer ones of others.
        """
        live, batch = self._queues.live, self._queues.batch
        self._queues.share_live(step.budget)
        self._advance(decoding(live.running), step)
        left = self._time = LiveStepTime(self._cost, self._live_step_seconds, step, batch, self._live_prompts())
        left.keep_for_batch(step)
        if live.waiting and live.waiting[0].place:
            begun = ((request.place, request.known - request.computed) for request in in_prompt(live.running))
            self._admit(live, step, max(begun, default=(0.0, 0)))
        self._advance_prompts(live.running, step)
        self._admit(live, step)
        left.open_to_batch(step)
        left.spend_rows(self._advance_within(left.rows(), decoding(batch.running), step))
        self._advance_prompts(batch.running, step)

    def _live_prompts(self) -> int:
        """Return how many live requests have a prompt to compute, and a slot for it."""
        live = self._queues.live
        return sum(1 for _ in in_prompt(live.running)) + min(len(live.waiting), len(self._slots.free))

    def _room(self, step: StepBuilder) -> int:
        """Return how many prompt tokens the step has room for."""
        return max(0, step.budget if self._time is None else min(step.budget, self._time.tokens(0)))

    def _advance_prompts(self, requests: list[RequestState], step: StepBuilder) -> None:
        """Advance the requests that do not decode yet, while time is left."""
        for request in in_prompt(requests):
            if request.last_step == step.number:
                continue  # it has just begun
            if not self._room(step):
                step.outstanding += self._kv_cache.pages_to_finish(request)
            else:
                self._advance_prompt(request, step)

    def _advance_prompt(self, request: RequestState, step: StepBuilder) -> None:
        """Advance a request as far as room is left, or to its end if prompts stay whole."""
        if self._whole_prompts:
            self._advance_whole(request, step)
        elif self._time is None:
            self._advance([request], step)
        else:
            start = request.computed
            count = self._advance_within(self._time.tokens(start), [request], step)
            self._time.spend_tokens(start, count)

    def _advance_whole(self, request: RequestState, step: StepBuilder) -> None:
        """Advance a request that begins; it may exceed the budget."""
        left, step.budget = step.budget - request.known, request.known
        self._advance([request], step)
        step.budget += left
        if self._time is not None:
            self._time.spend_tokens(0, request.computed)

    def _advance_within(self, tokens: int, requests: Iterable[RequestState], step: StepBuilder) -> int:
        """Advance requests by at most `tokens` in total; return the number of tokens."""
        rest = max(0, step.budget - tokens)
        before = step.budget = step.budget - rest
        self._advance(requests, step)
        count = before - step.budget
        step.budget += rest
        return count

    def _advance(self, requests: Iterable[RequestState], step: StepBuilder) -> None:
        """Assign uncomputed tokens to requests with a slot, up to the budget.

        Every row of every step passes this loop, so its cost per row is the host's cost of a step.
        """
        budget, number = step.budget, step.number
        add_slot, add_start, add_count = step.slots.append, step.starts.append, step.counts.append
        add_samples, add_sampling = step.samples.append, step.sampling.append
        for request in requests:  # preemption shortens the list only after the current request
            if not budget:
                break
            start, known = request.computed, request.known
            if known >= request.limit or request.held:
                continue  # its last token is in a launched step, or its guide is not ready
            count = known - start
            if count > budget:
                count = budget
            end = start + count
            if end > request.capacity:
                end = self._extend(request, end, step)
                count = end - start
                if count <= 0:
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
                step.unsampled.append(request)
                step.outstanding += self._kv_cache.pages_to_finish(request)
            if end >= request.hash_at:
                self._kv_cache.cache_blocks(request)
        step.budget = budget

    def _score(self, request: RequestState, end: int, step: StepBuilder) -> None:
        """Report the log probabilities of the prompt tokens after the step's next row.

        Each is reported once, also when tokens are recomputed after a preemption.
        """
        last = min(end + 1, request.prompt_length)
        step.prompt_scores.append(PromptScores(len(step.slots), request.next_score, last))
        step.scored.append(request)
        request.next_score = last if last < request.prompt_length else sys.maxsize

    def _extend(self, request: RequestState, end: int, step: StepBuilder) -> int:
        """Allocate blocks for a request's first `end` tokens; return up to where it can go on.

        Requests of lower priority are preempted if it could not go on at all.
        """
        kv_cache = self._kv_cache
        end, pages = kv_cache.reach(request, end)
        if pages:
            if not self._queues.make_room(pages, request, step.number):
                step.short = True
                return request.computed
            step.new_blocks += kv_cache.grow(request, end)
        return end

    def _admit_batch(self, step: StepBuilder) -> None:
        queues = self._queues
        if queues.batch.waiting:
            running = bool(queues.live.running or queues.batch.running)
            if not self._batching.defers(len(self._slots.free), self._pool.num_free, running):
                self._admit(queues.batch, step)

    def _admit(
        self, priority_class: PriorityClass, step: StepBuilder, before: tuple[float, int] = (math.inf, 0)
    ) -> None:
        """Admit waiting requests by priority, as long as place and length are less than `before`.

        Their known tokens must fit beside the tokens that running requests may soon need.
        """
        queues = self._queues
        while not step.short and (room := self._room(step)):
            request = next((request for request in priority_class.waiting if not request.held), None)
            if request is None or (request.place, request.known) >= before:
                return
            if self._whole_prompts and step.slots and not self._fits_whole(request, room):
                return
            if request.known > len(request.tokens) or not queues.find_slot(request, room):
                return
            rows = len(queues.live.running) + (0 if request.live else len(queues.batch.running))
            reserve = step.outstanding + rows * self._kv_cache.block_pages
            if not request.live and reserve >= self._pool.num_free:
                return
            # Cached tokens have no logits, so everything is computed while prompt tokens are to be
            # scored.
            prefix = self._kv_cache.find_prefix(request) if request.next_score == sys.maxsize else []
            need = self._kv_cache.pages_to_begin(request, prefix) + reserve
            kept = queues.kept_for_batch(request)
            has_pages = need + kept <= self._pool.num_free
            if has_pages and (request.live or queues.has_room(request, prefix, step.number)):
                self._enter(request, prefix, step)
            elif kept or not (request.live and queues.make_room(need, request, step.number)):
                step.short = request.live and not kept and queues.await_pages()
                return

    def _fits_whole(self, request: RequestState, room: int) -> bool:
        """Return whether a whole prompt starts beside others in a step.

        While live requests limit the steps, a batch request saves up room that is too small for it,
        and starts once the sum is enough: otherwise endless live requests would stop it.
        """
        if request.live or self._time is None:
            return request.known <= room
        if request.known <= room + self._saved_tokens:
            return True
        self._saved_tokens += room
        return False

    def _enter(self, request: RequestState, prefix: Prefix, step: StepBuilder) -> None:
        now = time.monotonic()
        self._queues.enter(request, prefix, step.number)
        if not request.live:
            self._saved_tokens = 0
        first = request.cached_tokens < 0
        step.entries.append(SlotEntry(request, now, first))
        if first:
            request.waited = now - request.arrived
            request.cached_tokens = min(request.computed, request.prompt_length)
        step.added.append(
            AddedRequest(
                request.slot,
                request.tokens.copy(),
                request.prompt_length,
                request.sampling,
                request.pooling,
                request.second_text,
            )
        )
        step.new_blocks += self._kv_cache.held_blocks(request)
        self._advance_prompt(request, step)
