"""The scheduler's decisions, one by one.

What holds for every schedule is in test_scheduler_properties.py.
"""

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams, Stats, StepOutput, TokenLogprobs
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.scheduler import Scheduler

SIZE = 4
EOS = 99


def make_scheduler(
    *,
    seqs: int = 4,
    budget: int = 64,
    blocks: int = 65,
    depth: int = 0,
    max_model_len: int = 256,
    caching: bool = True,
    admission_batch: int = 1,
) -> Scheduler:
    kv_cache = KVCache(blocks, SIZE, caching)
    return Scheduler(
        seqs,
        budget,
        max_model_len,
        kv_cache,
        depth,
        vocab_size=100,
        eos_token_ids=[EOS],
        live_step_seconds=0.15,
        admission_batch=admission_batch,
    )


def request(
    number: int,
    prompt: int = 5,
    max_tokens: int = 10,
    *,
    live: bool = False,
    output: tuple[int, ...] = (),
    priority: int = 0,
) -> EngineRequest:
    tokens = [number % 50 + 1] * prompt
    return EngineRequest(number, tokens, list(output), SamplingParams(max_tokens, stop_token_ids=(98,)), live, priority)


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def finish(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> StepOutput:
    return scheduler.update(plan, StepResult(np.full(int(plan.samples.sum()), token, dtype=np.int32)))


def plan_and_finish(scheduler: Scheduler) -> StepPlan:
    plan = plan_of(scheduler)
    finish(scheduler, plan)
    return plan


def step(scheduler: Scheduler, token: int = 7) -> StepOutput:
    return finish(scheduler, plan_of(scheduler), token)


def ended(output: StepOutput | None) -> dict[int, Finish]:
    assert output is not None
    return {number: Finish(how) for number, how in zip(output.request_ids, output.finish, strict=True) if how}


def run_dry(scheduler: Scheduler) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while scheduler.unfinished:
        output = step(scheduler)
        for number, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens.setdefault(number, []).append(token)
    check_idle(scheduler)
    return tokens


def test_nothing_of_the_host_half_imports_torch() -> None:
    modules = [
        "scheduling.scheduler",
        "scheduling.forecast",
        "scheduling.kv_cache",
        "scheduling.request",
        "messages.step",
        "messages.core",
        "messages.config",
        "messages.transport",
        "core",
        "guides.compiler",
        "guides.guide_threads",
        "client.async_engine",
    ]
    code = (
        f"import sys, {', '.join('workers.engine.' + module for module in modules)}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_decode_and_prefill_share_one_budget() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(request(1, prompt=5))
    step(scheduler)
    scheduler.add(request(2, prompt=20))
    plan = plan_of(scheduler)
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()) == ([5, 0], [1, 7], [True, False])
    assert finish(scheduler, plan).request_ids == [1]
    plan = plan_of(scheduler)
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([6, 7], [1, 7])


def test_new_blocks_continue_the_slots_table() -> None:
    scheduler = make_scheduler(budget=6)
    scheduler.add(request(1, prompt=10))
    first = plan_of(scheduler)
    finish(scheduler, first)
    second = plan_of(scheduler)
    assert [(new.slot, new.first, len(new.block_ids)) for new in first.new_blocks + second.new_blocks] == [
        (0, 0, 2),
        (0, 2, 1),
    ]
    assert first.added[0].token_ids == [2] * 10
    assert second.added == []


def test_a_live_request_takes_a_batch_ones_slot_at_the_next_step() -> None:
    scheduler = make_scheduler(seqs=2)
    for number in (1, 2):
        scheduler.add(request(number))
    step(scheduler)
    scheduler.add(request(3, live=True))
    output = step(scheduler)
    assert output.request_ids == [3, 1]
    assert (output.stats.preemptions, output.stats.waiting) == (1, 1)


def test_one_step_ahead_live_requests_get_their_slots_when_the_launched_step_is_retired() -> None:
    scheduler = make_scheduler(seqs=3, depth=1)
    for number in (1, 2, 3):
        scheduler.add(request(number))
    first = plan_of(scheduler)
    for number in (4, 5):
        scheduler.add(request(number, live=True))
    second = plan_of(scheduler)
    assert second.added == []
    finish(scheduler, first)
    third = plan_of(scheduler)
    assert [added.token_ids[0] for added in third.added] == [5, 6]


@pytest.mark.usefixtures("crowded")
def test_a_live_request_takes_batch_ones_blocks() -> None:
    scheduler = make_scheduler(blocks=9, caching=False)  # 32 tokens
    for number in (1, 2):
        scheduler.add(request(number, prompt=9, max_tokens=20))
    step(scheduler)
    scheduler.add(request(3, prompt=17, live=True))
    assert step(scheduler).request_ids == [3, 1]
    assert {number: len(tokens) for number, tokens in run_dry(scheduler).items()} == {3: 9, 1: 18, 2: 19}


def test_batch_requests_never_displace_a_live_one() -> None:
    scheduler = make_scheduler(blocks=9, caching=False)
    scheduler.add(request(1, prompt=9, max_tokens=20))
    step(scheduler)
    scheduler.add(request(2, prompt=9, max_tokens=12, live=True))
    order = []
    while scheduler.unfinished:
        output = step(scheduler)
        order += list(ended(output))
        assert 2 in output.request_ids or 2 in order
    assert order == [2, 1]


@pytest.mark.usefixtures("crowded")
def test_the_newest_is_preempted_and_keeps_its_tokens() -> None:
    scheduler = make_scheduler(blocks=9, caching=False)
    for number in (1, 2):
        scheduler.add(request(number, prompt=5, max_tokens=20))
    while (output := step(scheduler)).stats.preemptions == 0:
        assert output.request_ids == [1, 2]
    assert output.request_ids == [1]
    seen = 0
    while scheduler.unfinished:
        plan = plan_of(scheduler)
        for added in plan.added:
            assert added.prompt_length == 5
            assert added.token_ids[5:] == [7] * (len(added.token_ids) - 5)
            seen = len(added.token_ids) - 5
        finish(scheduler, plan)
    assert seen > 0
    check_idle(scheduler)


def test_a_preempted_request_comes_back_before_newer_ones() -> None:
    scheduler = make_scheduler(seqs=1)
    scheduler.add(request(1, max_tokens=3))
    scheduler.add(request(2, max_tokens=3))
    step(scheduler)
    scheduler.add(request(3, max_tokens=2, live=True))
    order = []
    while scheduler.unfinished:
        order += step(scheduler).request_ids
    assert order == [3, 3, 1, 1, 2, 2, 2]


def test_the_waiting_come_in_by_priority_and_then_by_arrival() -> None:
    scheduler = make_scheduler(seqs=1)
    for number, priority, live in (
        (1, 1, False),
        (2, 0, False),
        (3, -5, False),
        (4, 9, True),
        (5, 0, False),
        (6, 8, True),
    ):
        scheduler.add(request(number, max_tokens=1, priority=priority, live=live))
    order = []
    while scheduler.unfinished:
        order += step(scheduler).request_ids
    assert order == [6, 4, 3, 2, 5, 1]


@pytest.mark.usefixtures("crowded")
def test_the_lowest_priority_is_preempted_though_it_came_first() -> None:
    scheduler = make_scheduler(blocks=9, caching=False)
    scheduler.add(request(1, prompt=5, max_tokens=20, priority=1))
    scheduler.add(request(2, prompt=5, max_tokens=20))
    while (output := step(scheduler)).stats.preemptions == 0:
        assert output.request_ids == [2, 1]
    assert output.request_ids == [2]
    assert list(run_dry(scheduler)) == [2, 1]


def test_no_request_enters_whose_prompt_does_not_fit_beside_the_running_ones() -> None:
    scheduler = make_scheduler(blocks=9, caching=False, budget=8)
    scheduler.add(request(1, prompt=20, max_tokens=8))
    scheduler.add(request(2, prompt=20, max_tokens=8))
    plan = plan_of(scheduler)
    while not plan.samples.any():
        assert len(plan.slots) == 1
        finish(scheduler, plan)
        plan = plan_of(scheduler)
    finish(scheduler, plan)
    run_dry(scheduler)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (EngineRequest(1, [], [], SamplingParams(4)), "the prompt has no tokens"),
        (EngineRequest(1, [1] * 256, [], SamplingParams(4)), "the prompt has 256 tokens"),
        (EngineRequest(1, [1, 100], [], SamplingParams(4)), "token id 100 is outside the vocabulary of 100"),
        (EngineRequest(1, [1], [-1], SamplingParams(4)), "token id -1 is outside"),
    ],
)
def test_what_cannot_run_ends_with_a_sentence(bad: EngineRequest, says: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(bad)
    assert scheduler.schedule() is None
    output = scheduler.ended()
    assert ended(output) == {1: Finish.ERROR}
    assert output is not None
    assert says in output.errors[1]
    check_idle(scheduler)


def test_the_context_is_no_longer_than_the_cache() -> None:
    scheduler = make_scheduler(blocks=5)
    assert scheduler.max_model_len == 16
    scheduler.add(request(1, prompt=15, max_tokens=100))
    scheduler.add(request(2, prompt=16))
    assert ended(scheduler.ended()) == {2: Finish.ERROR}
    assert ended(step(scheduler)) == {1: Finish.LENGTH}


@pytest.mark.parametrize(
    ("token", "how", "stop"), [(98, Finish.STOP, 98), (EOS, Finish.STOP, EOS), (7, Finish.RUNNING, -1)]
)
def test_a_stop_token_ends_a_request_and_is_sent(token: int, how: Finish, stop: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    output = step(scheduler, token)
    assert (output.token_ids, output.finish, output.stop_token) == ([token], [how], [stop])


def test_ignore_eos_leaves_the_other_stop_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(EngineRequest(1, [1, 2], [], SamplingParams(9, ignore_eos=True, stop_token_ids=(98,))))
    assert step(scheduler, EOS).finish == [Finish.RUNNING]
    assert step(scheduler, 98).finish == [Finish.STOP]


@pytest.mark.parametrize(
    ("output", "max_tokens", "how", "stop"),
    [
        ((7, 7, 7), 3, Finish.LENGTH, -1),
        ((7, 98), 9, Finish.STOP, 98),
        ((7, EOS), 9, Finish.STOP, EOS),
        ((), 0, Finish.LENGTH, -1),
    ],
)
def test_a_request_with_nothing_left_to_generate_ends_without_a_step(
    output: tuple[int, ...], max_tokens: int, how: Finish, stop: int
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, max_tokens=max_tokens, output=output))
    assert scheduler.schedule() is None
    message = scheduler.ended()
    assert ended(message) == {1: how}
    assert message is not None
    assert (message.token_ids, message.counts, message.stop_token) == ([], [0], [stop])
    assert scheduler.ended() is None


def test_a_forced_prefix_counts_and_is_not_sent_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, prompt=3, max_tokens=4, output=(8, 9)))
    plan = plan_of(scheduler)
    assert (plan.added[0].token_ids, plan.added[0].prompt_length, plan.counts.tolist()) == ([2, 2, 2, 8, 9], 3, [5])
    assert finish(scheduler, plan).token_ids == [7]
    assert ended(step(scheduler)) == {1: Finish.LENGTH}


def test_requests_of_one_step_share_a_prefix() -> None:
    scheduler = make_scheduler()
    for number in (1, 2, 3):
        scheduler.add(EngineRequest(number, [*range(10), 50 + number], [], SamplingParams(1)))
    plan = plan_of(scheduler)
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([0, 8, 8], [11, 3, 3])
    output = finish(scheduler, plan)
    assert (output.cached_tokens, output.stats.prefix_hit_tokens) == ([0, 8, 8], 16)
    check_idle(scheduler)


def test_a_lookup_in_the_prefix_cache_counts_once_per_request() -> None:
    """Not again when a preempted request is admitted again, or a step undone; nor where the prompt
    is scored, which looks nothing up.
    """
    scheduler = make_scheduler(seqs=1)
    scheduler.add(request(1, prompt=9, max_tokens=2))
    scheduler.undo(plan_of(scheduler))
    step(scheduler)
    scheduler.add(request(51, prompt=9, live=True, max_tokens=1))  # the same prompt
    step(scheduler)
    stats = step(scheduler).stats
    assert (stats.preemptions, stats.prefix_queries, stats.prefix_hits) == (1, 18, 8)
    scheduler.add(EngineRequest(3, [*range(10)], [], SamplingParams(1, prompt_logprobs=0)))
    assert scored(scheduler).prefix_queries == 18


def scored(scheduler: Scheduler) -> Stats:
    """After a step that scores a prompt of 10 tokens."""
    plan = plan_of(scheduler)
    scores = [[TokenLogprobs([1], [-1.0], 1)] * 9]
    return scheduler.update(plan, StepResult(np.array([7], dtype=np.int32), prompt_logprobs=scores)).stats


def test_a_request_waits_from_its_arrival_to_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 20.0, 30.0, 40.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    scheduler = make_scheduler(seqs=1)
    for number, live in ((1, False), (2, True), (3, False)):
        added = request(number, max_tokens=1, live=live)
        added.arrived = 4.0 if number < 3 else 0.0
        scheduler.add(added)
    observed = [step(scheduler).stats.queue_seconds for _ in range(3)]
    assert observed == [[(6.0, "live")], [(16.0, "batch")], []]


def test_cached_tokens_come_with_the_first_token() -> None:
    """For a stop string ends a request without another word from the core."""
    scheduler = make_scheduler()
    scheduler.add(EngineRequest(1, [*range(10)], [], SamplingParams(1)))
    step(scheduler)
    scheduler.add(EngineRequest(2, [*range(10)], [], SamplingParams(3)))
    assert [step(scheduler).cached_tokens for _ in range(3)] == [[8], [0], [0]]


def test_cached_tokens_are_those_of_the_first_start() -> None:
    scheduler = make_scheduler(seqs=1)
    scheduler.add(request(1, prompt=9, max_tokens=2))
    step(scheduler)
    scheduler.add(request(2, live=True, max_tokens=1))
    step(scheduler)
    output = step(scheduler)
    assert (output.request_ids, output.cached_tokens) == ([1], [0])
    assert output.stats.prefix_hit_tokens == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_frees_everything_at_any_moment(depth: int) -> None:
    scheduler = make_scheduler(seqs=1, depth=depth)
    for number in (1, 2):
        scheduler.add(request(number))
    plan = plan_of(scheduler)
    scheduler.abort([1, 2, 3])
    output = finish(scheduler, plan)
    assert ended(output) == {1: Finish.ABORT, 2: Finish.ABORT}
    assert output.token_ids == []
    assert scheduler.schedule() is None
    check_idle(scheduler)


def test_one_step_ahead_the_token_after_the_end_is_dropped() -> None:
    scheduler = make_scheduler(seqs=1, depth=1)
    scheduler.add(request(1, max_tokens=9))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert (second.starts.tolist(), second.counts.tolist(), second.samples.tolist()) == ([5], [1], [True])
    assert ended(finish(scheduler, first, 98)) == {1: Finish.STOP}
    scheduler.add(request(2, max_tokens=1))
    # The only slot is in use by the second step until that is retired
    assert scheduler.schedule() is None
    assert finish(scheduler, second).request_ids == []
    assert plan_of(scheduler).added[0].token_ids == [3] * 5


def test_one_step_ahead_nothing_is_computed_past_the_last_token() -> None:
    scheduler = make_scheduler(depth=1)
    scheduler.add(request(1, max_tokens=2))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert scheduler.max_model_len == 256
    assert ended(finish(scheduler, first)) == {}
    assert scheduler.schedule() is None
    assert ended(finish(scheduler, second)) == {1: Finish.LENGTH}
    check_idle(scheduler)


def test_one_step_ahead_a_preempted_request_waits_for_its_unseen_token() -> None:
    scheduler = make_scheduler(seqs=1, depth=1)
    scheduler.add(request(1))
    first = plan_of(scheduler)
    scheduler.add(request(2, live=True, max_tokens=1))
    assert scheduler.schedule() is None  # preempted, but its slot is in use by the first step
    assert finish(scheduler, first).request_ids == [1]
    second = plan_of(scheduler)
    assert finish(scheduler, second).request_ids == [2]
    assert plan_of(scheduler).added[0].token_ids == [2] * 5 + [7]


@pytest.mark.parametrize("admission_batch", [1, 4])
def test_where_slots_are_scarce_prompts_are_admitted_in_batches(admission_batch: int) -> None:
    """A queue behind 64 slots: nearly every step would have a prompt in it; in batches one in a few
    does, and a few slots idle.
    """
    scheduler = make_scheduler(seqs=64, budget=1000, blocks=4000, admission_batch=admission_batch)
    draw = random.Random(1)
    for number in range(1000):
        scheduler.add(request(number, prompt=3, max_tokens=draw.randint(10, 60)))
    steps, with_prompts, rows = 0, 0, 0
    while scheduler.unfinished > 100:
        plan = plan_of(scheduler)
        steps, with_prompts, rows = steps + 1, with_prompts + bool(plan.added), rows + len(plan.slots)
        finish(scheduler, plan)
    assert (with_prompts > 0.8 * steps) if admission_batch == 1 else (with_prompts < 0.45 * steps)
    assert rows > (63 if admission_batch == 1 else 61) * steps


def test_admission_is_deferred_only_while_little_is_free_and_for_a_bounded_time() -> None:
    scheduler = make_scheduler(seqs=8, blocks=2000, admission_batch=4)
    for number in range(3):
        scheduler.add(request(number, max_tokens=100))
    assert len(plan_and_finish(scheduler).added) == 3  # five slots are left
    for number in range(3, 9):
        scheduler.add(request(number, max_tokens=1 if number == 3 else 100))
    assert len(plan_and_finish(scheduler).added) == 5
    # One slot is free, and a request waits for it
    late = [len(plan_and_finish(scheduler).added) for _ in range(33)]
    assert late == [0] * 32 + [1]


def test_admission_is_not_deferred_when_idle_or_for_live_requests() -> None:
    scheduler = make_scheduler(seqs=4, blocks=3, admission_batch=4)  # two blocks: always scarce
    scheduler.add(request(1, prompt=3, max_tokens=3))
    assert len(plan_and_finish(scheduler).added) == 1
    scheduler.add(request(2, prompt=2, max_tokens=2))
    assert len(plan_and_finish(scheduler).added) == 0
    scheduler.add(request(3, prompt=2, max_tokens=2, live=True))
    assert [added.prompt_length for added in plan_and_finish(scheduler).added] == [2]
    run_dry(scheduler)


def test_running_further_ahead_than_the_depth_is_refused() -> None:
    scheduler = make_scheduler(depth=0)
    scheduler.add(request(1))
    plan_of(scheduler)
    with pytest.raises(RuntimeError, match="depth 0"):
        scheduler.schedule()


def test_retiring_out_of_order_is_refused() -> None:
    scheduler = make_scheduler(depth=1)
    scheduler.add(request(1))
    plan_of(scheduler)
    with pytest.raises(RuntimeError, match="retired in place of step 1"):
        finish(scheduler, plan_of(scheduler))


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request(1))


def test_a_block_that_is_never_freed_is_detected_when_idle() -> None:
    kv_cache = KVCache(9, SIZE)
    scheduler = Scheduler(1, 8, 32, kv_cache, 0, vocab_size=100, live_step_seconds=0.15)
    check_idle(scheduler)
    kv_cache.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 KV pages are in use"):
        check_idle(scheduler)


def test_stats_count_what_happened() -> None:
    scheduler = make_scheduler(seqs=1)
    for number in (1, 2):
        scheduler.add(request(number, max_tokens=3))
    stats = step(scheduler).stats
    assert (stats.running, stats.waiting, stats.steps, stats.tokens, stats.computed_tokens) == (1, 1, 1, 1, 5)
    assert stats.free_blocks == 64 - 2
    run_dry(scheduler)


def test_a_timed_request_is_told_in_which_steps_it_got_a_slot() -> None:
    """Its first, also where that was undone before, and the one after a preemption."""
    scheduler = make_scheduler(seqs=1)
    timed = request(1)
    timed.timed = True
    scheduler.add(timed)
    scheduler.undo(plan_of(scheduler))
    before = time.monotonic()
    plan = plan_of(scheduler)
    [(number, when)] = finish(scheduler, plan).starts[1]
    assert (number, before <= when <= time.monotonic()) == (plan.step, True)
    assert step(scheduler).starts == {}
    scheduler.add(request(2, max_tokens=2, live=True))
    outputs = [step(scheduler) for _ in range(4)]
    [again] = [output for output in outputs if output.starts]
    assert [number for number, _ in again.starts[1]] == [again.step]
    assert again.request_ids == [1]
    assert again.step > plan.step + 2
    scheduler.abort([1])
    assert scheduler.ended() is not None
    assert scheduler._output.fresh_starts == {}
