"""A cache of several groups: which prefixes it finds, what it evicts, and how many pages it takes.

What holds for every schedule is in test_scheduler_properties.py.
"""

import numpy as np
import pytest

from tests.workers.engine.scheduling.integrity import check_cache, check_idle
from workers.engine.messages.cache_groups import CacheGroups, CacheRule, LayerCache, group_layers
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams, StepOutput
from workers.engine.messages.step import NOT_FINITE, StepPlan, StepResult
from workers.engine.scheduling.hybrid_cache import HybridKVCache, make_cache
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.scheduler import Scheduler

SIZE = 4
WINDOW = 8
ALL = LayerCache(CacheRule(), 2, (2,))
LOCAL = LayerCache(CacheRule(WINDOW), 2, (2,))
CHUNKS = LayerCache(CacheRule(chunk=6), 2, (2,))
MODELS = {
    "a window": [LOCAL, ALL],
    "a window everywhere": [LOCAL],
    "chunks": [CHUNKS, CHUNKS, ALL],
    "longer blocks": [LayerCache(CacheRule(3), 1, (1,)), ALL],
}
SYSTEM = list(range(100, 100 + 6 * SIZE))


def groups_of(layers: list[LayerCache]) -> CacheGroups:
    return group_layers(layers, SIZE)


class HybridRun:
    """A scheduler of a model with a window and a group that keeps all, and its steps."""

    def __init__(
        self,
        pages: int = 400,
        *,
        layers: list[LayerCache] | None = None,
        budget: int = 64,
        depth: int = 0,
        max_model_len: int = 512,
        seqs: int = 4,
    ) -> None:
        self.cache = HybridKVCache(groups_of(layers or [LOCAL, ALL]), pages, (depth + 1) * budget)
        self.scheduler = Scheduler(
            seqs, budget, max_model_len, self.cache, depth, vocab_size=1000, live_step_seconds=10.0
        )
        self.cached: dict[int, int] = {}
        self.finish: dict[int, Finish] = {}
        self.launched: list[StepPlan] = []
        self._depth, self._number = depth, 0

    def add(self, tokens: list[int], max_tokens: int = 1, *, live: bool = False) -> int:
        self._number += 1
        params = SamplingParams(max_tokens, ignore_eos=True)
        self.scheduler.add(EngineRequest(self._number, tokens, [], params, live))
        return self._number

    def step(self, token: int = 7) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.launched.append(plan)
        if self.launched and (plan is None or len(self.launched) > self._depth):
            first = self.launched.pop(0)
            result = StepResult(np.full(int(first.samples.sum()), token, np.int32))
            self._take(self.scheduler.update(first, result))
        self._take(self.scheduler.ended())
        check_cache(self.scheduler)
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def to_the_end(self) -> None:
        while self.scheduler.unfinished or self.launched:
            self.step()
        check_idle(self.scheduler)

    def ask(self, tokens: list[int], max_tokens: int = 1, *, live: bool = False) -> int:
        """Run a request to its end; return how many tokens of its prompt were cached."""
        number = self.add(tokens, max_tokens, live=live)
        self.to_the_end()
        return self.cached[number]

    def anchors(self) -> list[int]:
        """Return the depths of all anchors, the first to be evicted first."""
        tree = self.cache.tree
        return [node.depth for tier in (tree._batch_tier, tree._live_tier, tree._retained_tier) for node in tier]

    def _take(self, output: StepOutput | None) -> None:
        if output is not None:
            for row, number in enumerate(output.request_ids):
                self.cached.setdefault(number, output.cached_tokens[row])
                if output.finish[row]:
                    self.finish[number] = Finish(output.finish[row])


def own(number: int, blocks: float) -> list[int]:
    return [200 + number] * int(blocks * SIZE)


def test_pages_of_a_window_are_freed_while_the_request_runs() -> None:
    run = HybridRun()
    run.add(own(1, 10), 100)
    most = 0
    for _ in range(100):
        run.step()
        (running,) = run.scheduler._queues.running or [None]
        if running is not None and running.computed > 60:
            full = -(-running.capacity // SIZE)
            most = max(most, running.pages_held - full)
    assert most == 1 + WINDOW // SIZE
    run.to_the_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_follow_up_finds_the_last_border_of_a_conversation(depth: int) -> None:
    run = HybridRun(depth=depth)
    first = own(1, 10.5)
    assert run.ask(first, 2 * SIZE) == 0
    conversation = first + [7] * 2 * SIZE
    assert run.ask([*conversation, *own(2, 3)]) == (len(conversation) - 1) // SIZE * SIZE


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_preempted_request_goes_on_from_its_last_border(layers: list[LayerCache]) -> None:
    run = HybridRun(layers=layers)
    number = run.add(own(1, 10), 40)
    run.steps(30)
    (running,) = run.scheduler._queues.running
    run.scheduler._queues._preempt(running)
    size, computed = run.cache.block_size, len(running.tokens) - 1
    run.step()
    assert (running.id, running.computed) == (number, computed + 1)
    assert run.scheduler._stats.prefix_hit_tokens == computed // size * size
    run.to_the_end()


def test_prompts_that_part_behind_a_request_that_is_far_ahead_meet_from_the_third_on() -> None:
    """The window behind the common part is gone, so the second request computes it once more."""
    run = HybridRun()
    ahead = run.add([*SYSTEM, *own(1, 20)], 50)
    run.steps(30)
    found = [run.add([*SYSTEM, *own(number, 3)]) for number in (2, 3, 4)]
    for _ in found:
        run.steps(4)
    run.to_the_end()
    assert [run.cached[number] for number in (ahead, *found)] == [0, 0, len(SYSTEM), len(SYSTEM)]


def test_prompts_that_wait_meet_where_they_part_from_the_request_that_runs() -> None:
    run = HybridRun(seqs=1)
    numbers = [run.add([*SYSTEM, *own(number, 20)], 30) for number in range(1, 4)]
    run.to_the_end()
    assert [run.cached[number] for number in numbers] == [0, len(SYSTEM), len(SYSTEM)]


def test_a_border_inside_the_window_of_a_running_request_is_found() -> None:
    run = HybridRun()
    run.add([*SYSTEM, 1], 20)
    run.step()
    number = run.add([*SYSTEM, 2])
    run.to_the_end()
    assert run.cached[number] == len(SYSTEM)


def test_batch_anchors_are_evicted_before_live_ones_and_both_before_the_one_a_request_waits_for() -> None:
    run = HybridRun(seqs=1)
    for number, live in ((1, False), (2, True), (3, False)):
        run.ask(own(number, number + 2), live=live)
    assert run.anchors() == [2, 3, 4, 5, 3, 4]  # the end of each prompt, and of each request
    run.add(own(9, 3), 30)
    run.step()
    run.add([*own(1, 3), 5])
    assert run.anchors() == [2, 4, 5, 2, 3, 4, 3]
    run.to_the_end()


def test_a_conversation_that_waits_holds_only_its_last_border() -> None:
    run = HybridRun(seqs=1)
    conversation = own(1, 5.5)
    for turn in range(3):
        run.ask(conversation, SIZE)
        conversation = [*conversation, *[7] * SIZE, *own(turn, 2)]
    depths = run.anchors()
    assert len(depths) >= 3
    run.add(own(9, 3), 30)
    run.step()
    run.add(conversation)
    assert [node.depth for node in run.cache.tree._retained_tier] == [max(depths)]
    run.to_the_end()


def test_the_end_of_a_request_is_evicted_before_the_border_that_it_had_hit() -> None:
    run = HybridRun()
    run.ask([*SYSTEM, 1])
    run.ask([*SYSTEM, *own(1, 3.5)])
    assert run.anchors() == [9, 6]


def test_an_evicted_anchor_takes_all_that_no_other_needs() -> None:
    run = HybridRun()
    for number in range(1, 4):
        run.ask([*SYSTEM, *own(number, 5.5)])
    tree = run.cache.tree
    assert sorted(run.anchors()) == [6, 11, 11, 11]
    cached = [len(tree.nodes)]
    for _ in range(4):
        tree._evict()
        check_cache(run.scheduler)
        cached.append(len(tree.nodes))
    assert cached == [21, 16, 11, 6, 0]
    assert len(run.cache.pool.unused) == run.cache.num_pages - 1


def test_a_cache_full_of_old_prefixes_gives_all_its_pages_to_new_requests() -> None:
    run = HybridRun(pages=60)
    for number in range(1, 30):
        assert run.ask(own(number, 15)) == 0
    assert run.scheduler._stats.preemptions == 0
    assert run.ask([*own(29, 15), 1]) == 15 * SIZE


def test_numbers_that_are_not_finite_leave_no_block_in_the_cache() -> None:
    """Of windows too, whose blocks the request has released."""
    run = HybridRun()
    run.ask([*SYSTEM, 1])
    number = run.add([*SYSTEM, *own(1, 20)], 100)
    run.steps(20)
    assert len(run.cache.tree.nodes) > 20
    run.step(NOT_FINITE)
    assert run.finish == {number - 1: Finish.LENGTH, number: Finish.NOT_FINITE}
    assert not run.cache.tree.nodes
    check_idle(run.scheduler)
    assert run.ask([*SYSTEM, *own(1, 20)]) == 0


def test_a_request_that_shares_blocks_with_numbers_that_are_not_finite_does_not_cache_them_again() -> None:
    run = HybridRun(depth=1)
    for last in (1, 2):
        run.add([*SYSTEM, last], 30)
        run.step()
    spoiled, _ = run.scheduler._queues.running
    run.cache.forget(spoiled)
    run.to_the_end()
    assert not run.cache.tree.nodes


def test_a_chunk_of_an_earlier_time_with_a_slot_frees_nothing() -> None:
    """A request that is preempted, and begins again from a shorter prefix in the next step."""
    run = HybridRun(depth=1, budget=32)
    run.ask(own(1, 2))
    run.add(own(1, 30), 2)
    run.step()
    (request,) = run.scheduler._queues.running
    run.scheduler._queues._preempt(request)
    run.cache.tree.drop(run.cache.tree.nodes[request.block_hashes[2]])
    run.step()
    assert (request.computed, request.runs[0].first) == (8 + 32, 0)
    run.to_the_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunk_is_cut_to_the_free_pages_before_another_request_is_preempted(depth: int) -> None:
    run = HybridRun(pages=2 * 10 + 1, depth=depth, budget=16)
    run.add(own(1, 2), 40)
    run.step()
    run.add(own(2, 5), 4)
    while len(run.scheduler._queues.running) < 2:
        run.step()
    run.to_the_end()
    assert run.scheduler._stats.preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_single_request_of_the_longest_context_always_ends(layers: list[LayerCache], budget: int, depth: int) -> None:
    for pages in range(12, 28):
        run = HybridRun(pages, layers=layers, budget=budget, depth=depth, max_model_len=120)
        longest = run.scheduler.max_model_len
        number = run.add([1] * max(1, longest - 8), 200)
        run.to_the_end()
        assert run.finish == {number: Finish.LENGTH}
        assert run.scheduler._stats.preemptions == 0
        assert run.scheduler._stats.computed_tokens == longest - 1


def test_a_window_makes_room_for_longer_requests() -> None:
    """5 of 6 layers with a window, as Gemma 3 has them."""
    groups, full = groups_of([*[LOCAL] * 5, ALL]), groups_of([ALL] * 6)
    bytes_ = 600 * SIZE * 2
    hybrid = HybridKVCache(groups, bytes_ // groups.page_bytes, 64)
    assert hybrid.max_tokens > 5 * KVCache(bytes_ // full.page_bytes, SIZE).max_tokens


def test_admission_counts_the_pages_of_a_length_a_window_and_the_steps_in_flight() -> None:
    """21 blocks where all is kept; 3 of a window of 2 blocks, and 4 of two steps of 8 tokens."""
    run = HybridRun(depth=1, budget=8)
    assert run.cache.pages_for(20 * SIZE + 1) == 21 + (3 + 4)
    run.ask(own(1, 10))
    number = run.add([*own(1, 10), *own(2, 10), 1])
    request = run.scheduler._requests[number]
    prefix = run.cache.find_prefix(request)
    assert (len(prefix), run.cache.count_free(prefix)) == (10, 10 + 2)
    assert run.cache.pages_to_begin(request, prefix) == 21 + (3 + 4)
    run.to_the_end()


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([ALL, ALL], KVCache),
        ([LOCAL], HybridKVCache),
        ([LOCAL, ALL], HybridKVCache),
        ([LayerCache(CacheRule(), 1, (1,)), ALL], HybridKVCache),
    ],
)
def test_only_layers_that_differ_or_have_a_window_need_the_cache_of_several_groups(
    layers: list[LayerCache], kind: type
) -> None:
    made = make_cache(groups_of(layers), 50, 64, enable_prefix_caching=True)
    assert isinstance(made, kind)
    assert made.frees_old_blocks == (LOCAL in layers)


def test_a_cache_without_pages_for_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 pages, got 2"):
        HybridKVCache(groups_of([LOCAL, ALL]), 2, 64)
