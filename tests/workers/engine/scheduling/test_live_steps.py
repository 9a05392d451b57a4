"""Steps while a live request runs or waits, on a clock of their own."""

from collections import deque
from itertools import count

import numpy as np
import pytest

from tests.workers.engine.scheduling import timed
from tests.workers.engine.scheduling.integrity import check_cache
from tests.workers.engine.scheduling.test_scheduler import make_scheduler, request, run_dry, step
from tests.workers.engine.scheduling.timed import LIVE_STEP, TimedCall, TimedEngine, TimedStep
from workers.engine.messages.core import EngineRequest, PoolingParams, SamplingParams
from workers.engine.messages.step import StepPlan, StepResult
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.queues import BATCH_SHARE
from workers.engine.scheduling.scheduler import Scheduler

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def keep_full(engine: TimedEngine, waiting: int = 80, prompt: int = 900) -> None:
    while engine.unfinished_batch < waiting:
        engine.add(prompt, engine.draw.randint(32, 128), live=False)


def warm(engine: TimedEngine, turns: int = 40) -> None:
    """Let the engine learn from a batch alone."""
    for _ in range(turns):
        keep_full(engine)
        engine.turn()


def serve(engine: TimedEngine, call: TimedCall) -> list[TimedStep]:
    """Run beside a full batch until the call has ended; return the steps."""
    first = len(engine.steps)
    while not call.ended:
        keep_full(engine)
        engine.turn()
    return engine.steps[first:]


def computed_per_second(engine: TimedEngine, seconds: float, interval: float) -> tuple[float, list[TimedCall]]:
    """Run beside a full batch, with a live call every `interval` seconds if that is not 0."""
    began, computed, calls = engine.now, engine.scheduler._stats.computed_tokens, []
    due = engine.now + interval
    while engine.now < began + seconds:
        keep_full(engine)
        while interval and engine.now >= due:
            calls.append(engine.add(100, 64, live=True, at=due))
            due += interval * engine.draw.uniform(0.5, 1.5)
        engine.turn()
    return (engine.scheduler._stats.computed_tokens - computed) / (engine.now - began), calls


@DEPTHS
def test_a_step_beside_a_live_request_takes_no_longer_than_its_limit(depth: int) -> None:
    engine = TimedEngine(depth=depth)
    warm(engine)
    steps = [each for each in serve(engine, engine.add(100, 100, live=True)) if each.live]
    assert len(steps) > 90
    for each in steps:
        assert each.seconds <= max(LIVE_STEP, 1.15 * each.decode_seconds) * 1.1
    assert np.mean([each.batch_prompt_tokens for each in steps]) > 50


@DEPTHS
def test_steps_grow_at_once_when_the_last_live_request_ends(depth: int) -> None:
    engine = TimedEngine(depth=depth)
    warm(engine)
    steps = serve(engine, engine.add(10, 5, live=True))
    end = engine.now
    warm(engine, 3)
    after = next(step for step in engine.steps if step.end > end and not step.live)
    assert after.batch_prompt_tokens > 900 > 300 > max(step.batch_prompt_tokens for step in steps if step.live)


@DEPTHS
def test_a_live_request_that_arrives_during_a_step_waits_for_that_and_a_short_one_of_its_own(depth: int) -> None:
    engine = TimedEngine(depth=depth)
    warm(engine)
    while not (engine._launched or depth == 0):
        engine.turn()
    call = engine.add(50, 2, live=True)
    under_way = engine._launched[-1][1].end - engine.now if engine._launched else 0.0
    serve(engine, call)
    assert call.ttft <= under_way + 0.7 * LIVE_STEP


def test_live_rows_come_first_and_batch_prompts_give_way_first() -> None:
    engine = TimedEngine(slots=8)
    warm(engine)
    engine.run_dry()
    batch = [engine.add(50, 500, live=False) for _ in range(2)]
    stream = engine.add(50, 500, live=True)
    for _ in range(3):
        engine.turn()
    engine.add(3000, 4, live=False)
    prompt = engine.add(1000, 4, live=True)
    plan = engine.scheduler.schedule()
    assert plan is not None
    numbers = {request.slot: request.id for request in engine.scheduler._queues.running}
    order = [numbers[slot] for slot in plan.slots.tolist()]
    calls = [engine.calls.index(call) for call in (stream, prompt, *batch)]
    assert order[:4] == calls
    counts = dict(zip(order, plan.counts.tolist(), strict=True))
    assert 200 * 1.6 < counts[calls[1]] < 400 * 1.6
    assert sum(plan.counts[4:].tolist()) < 50


@DEPTHS
def test_steps_are_short_too_while_a_live_request_is_expected(depth: int) -> None:
    """Its grammar is being compiled."""
    engine = TimedEngine(depth=depth)
    warm(engine)
    engine.run_dry()
    keep_full(engine)
    engine.scheduler.expect_live(True)
    before = len(engine.steps)
    warm(engine, 20)
    assert max(step.seconds for step in engine.steps[before:]) < 1.15 * LIVE_STEP
    engine.scheduler.expect_live(False)
    warm(engine, 5)
    assert engine.steps[-1].seconds > 2 * LIVE_STEP


def test_a_long_live_prompt_is_cut_and_batch_requests_give_way_to_it() -> None:
    engine = TimedEngine()
    warm(engine)
    alone = 0.42e-3 * 900 + 0.11e-6 * 900**2 / 2
    call = engine.add(900, 2, live=True)
    steps = serve(engine, call)
    assert max(step.seconds for step in steps) < 1.1 * 1.6 * LIVE_STEP
    assert call.ttft < 1.5 * alone + LIVE_STEP


@DEPTHS
def test_many_live_prompts_share_few_long_steps(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shorter ones each prompt would wait for the rows that decode in all of them, which take as
    long here as without instructions for bf16.
    """
    monkeypatch.setattr(timed, "DEVICE", (0.01, 1.1e-3, 0.5e-6, 0.73e-3, 0.11e-6))
    engine = TimedEngine(depth=depth, slots=60)
    warm(engine)
    engine.run_dry()
    calls = [engine.add(64, 100, live=True) for _ in range(60)]
    while not all(call.tokens for call in calls):
        engine.turn()
    begun = len(engine.steps)
    prompts = 60 * (0.73e-3 * 64 + 0.11e-6 * 64**2 / 2)
    assert max(call.ttft for call in calls) < 1.16 * prompts
    engine.run_dry()
    assert max(step.seconds for step in engine.steps[:begun] if step.live) < 1.1 * 3.0 * LIVE_STEP
    assert max(step.seconds for step in engine.steps[begun:]) < 1.1 * LIVE_STEP


def longest_step_of_prompts(engine: TimedEngine, streams: int, prompts: int) -> float:
    """Return how many live steps the longest step takes while so many live requests begin, the
    first of them with a long prompt, beside others that decode.
    """
    running = [engine.add(20, 200, live=True) for _ in range(streams)]
    while not all(call.tokens for call in running):
        engine.turn()
    first = len(engine.steps)
    calls = [engine.add(2000 if not number else 64, 2, live=True) for number in range(prompts)]
    while not calls[0].tokens:
        engine.turn()
    return max(step.seconds for step in engine.steps[first:]) / LIVE_STEP


@DEPTHS
@pytest.mark.parametrize(
    ("slots", "streams", "prompts", "batch", "least", "most"),
    [
        (64, 40, 1, False, 1.4, 1.6),  # no other prompt waits
        (64, 40, 4, False, 2.1, 2.2),
        (64, 40, 20, False, 2.8, 3.0),
        (41, 40, 20, False, 1.4, 1.6),  # the others have no slot
        (64, 0, 20, False, 1.4, 1.6),  # no row decodes
        (64, 40, 20, True, 1.4, 1.6),  # batch requests wait
    ],
)
def test_how_long_a_step_may_take_for_live_prompts(
    depth: int, slots: int, streams: int, prompts: int, batch: bool, least: float, most: float
) -> None:
    engine = TimedEngine(depth=depth, slots=slots)
    warm(engine)
    engine.run_dry()
    if batch:
        keep_full(engine)
    assert least < longest_step_of_prompts(engine, streams, prompts) < 1.1 * most


def test_batch_rows_give_way_to_a_live_prompt() -> None:
    """Some decode in each of its steps, and all again once it is computed."""
    engine = TimedEngine()
    for _ in range(60):
        engine.add(20, 500, live=False)
    for _ in range(60):
        engine.turn()
    assert engine.steps[-1].rows == 60
    call = engine.add(2000, 20, live=True)
    first = len(engine.steps)
    while not call.tokens:
        engine.turn()
    assert all(5 < step.rows - step.live_rows < 50 for step in engine.steps[first:-1])
    engine.turn()
    assert engine.steps[-1].rows == 61


def test_on_a_device_with_slow_steps_a_live_prompt_alone_is_not_cut_to_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 7B parameters, whose weights are read in 230 ms."""
    monkeypatch.setattr(timed, "DEVICE", (0.23, 2e-3, 1e-6, 14e-3, 1e-7))
    engine = TimedEngine()
    for _ in range(6):
        engine.add(600, 20, live=False)
    engine.run_dry()
    call = engine.add(900, 3, live=True)
    engine.run_dry()
    assert call.ttft < 2 * (0.23 + 900 * 14e-3)


def test_a_pause_in_the_first_step_that_counts_does_not_keep_prompts_small() -> None:
    """No batch request corrects the cost of prompts either."""
    engine = TimedEngine()
    engine.add(15, 2, live=False)
    engine.run_dry()  # the worker's own request: the two cold steps
    engine.scheduler.step_cost.record(np.zeros(1, np.int32), np.full(1, 32, np.int32), 8.0)
    calls = []
    for _ in range(5):
        calls.append(engine.add(900, 8, live=True))
        engine.run_dry()
    assert calls[-1].ttft < 1.0


def test_chunks_are_small_before_anything_is_measured() -> None:
    engine = TimedEngine()
    keep_full(engine)
    engine.add(100, 2, live=True)
    engine.turn()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.counts.max() <= 32


@pytest.mark.parametrize("seed", range(3))
@DEPTHS
def test_live_calls_are_served_in_time_and_cost_the_batch_little(depth: int, seed: int) -> None:
    """On a machine whose steps take up to a fifth more or less than usual.

    The work of a minute differs by some per cent, since prompts and outputs are not in step.
    """
    engine = TimedEngine(depth=depth, noise=0.2, seed=seed)
    warm(engine)
    alone, _ = computed_per_second(engine, 60, 0)
    beside, calls = computed_per_second(engine, 60, 1.5)
    served = [call for call in calls[1:] if call.ended]
    assert len(served) > 25
    assert beside > 0.87 * alone
    assert max(call.longest_gap for call in served) < 0.25
    assert np.quantile([call.ttft for call in served], 0.99) < (0.33 if depth == 0 else 0.5)


@DEPTHS
def test_endless_live_requests_leave_batch_requests_their_share(depth: int) -> None:
    engine = TimedEngine(depth=depth, slots=20)
    warm(engine, 20)
    live: list[TimedCall] = []
    for turn in range(600):
        keep_full(engine, waiting=10, prompt=200)
        live = [call for call in live if not call.ended]
        live += [engine.add(100, 30, live=True) for _ in range(40 - len(live))]
        engine.turn()
        if turn == 200:
            began, ended = len(engine.steps), sum(call.ended for call in engine.calls if not call.live)
    steps = engine.steps[began:]
    queues = engine.scheduler._queues
    assert len(queues.live.running) <= 20 - int(20 * BATCH_SHARE)
    assert sum(call.ended for call in engine.calls if not call.live) > ended + 2
    assert all(step.seconds <= 1.15 * 1.6 * LIVE_STEP for step in steps)
    assert min(step.rows - step.live_rows for step in steps) >= 1


@DEPTHS
def test_endless_live_texts_leave_whole_texts_of_a_batch_their_share(depth: int) -> None:
    """The batch's share of a step is a fifth of its first text."""
    scheduler = Scheduler(
        8, 100, 100, KVCache(200, 16, False), depth, vocab_size=100, live_step_seconds=LIVE_STEP, tasks=["embed"],
        whole_prompts=True,
    )  # fmt: skip
    embed, ids = PoolingParams("embed"), count()
    waiting = {next(ids) for _ in range(3)}
    launched: deque[StepPlan] = deque()
    for number in sorted(waiting):
        scheduler.add(EngineRequest(number, [7] * 50, [], SamplingParams(0), pooling=embed))
    for _ in range(200):
        while len(scheduler._queues.live.waiting) < 8:
            scheduler.add(EngineRequest(next(ids), [7] * 20, [], SamplingParams(0), live=True, pooling=embed))
        plan = scheduler.schedule()
        if plan is not None:
            launched.append(plan)
        if plan is None or len(launched) > depth:
            plan = launched.popleft()
            output = scheduler.update(
                plan, StepResult(np.empty(0, np.int32), pooled=[b"1234"] * int(plan.samples.sum()))
            )
            waiting -= {*output.request_ids}
        if not waiting:
            return
    pytest.fail(f"{len(waiting)} texts of the batch starve")


@DEPTHS
def test_endless_live_requests_leave_batch_requests_their_blocks(depth: int) -> None:
    """Each live request takes a quarter of the cache, so that four would take all of it."""
    engine = TimedEngine(depth=depth, slots=20, blocks=101)
    live: list[TimedCall] = []
    batch = engine.add(40, 40, live=False)
    while not batch.ended:
        assert len(engine.steps) < 3000, "the batch request starves"
        live = [call for call in live if not call.ended]
        live += [engine.add(300, 90, live=True) for _ in range(8 - len(live))]
        engine.turn()
    engine.run_dry()


@DEPTHS
def test_a_live_request_may_take_all_blocks_when_no_other_live_one_runs(depth: int) -> None:
    engine = TimedEngine(depth=depth, slots=4, blocks=65)
    keep_full(engine, waiting=6, prompt=100)
    for _ in range(5):
        engine.turn()
    call = engine.add(900, 100, live=True)
    while not call.ended:
        assert len(engine.steps) < 500, "the live request waits for ever"
        engine.turn()
    engine.run_dry()
    assert all(each.ended for each in engine.calls)


def running(scheduler: Scheduler) -> list[int]:
    return [request.id for request in scheduler._queues.running]


def run_steps(scheduler: Scheduler, steps: int) -> None:
    for _ in range(steps):
        step(scheduler)


def test_a_live_request_beside_others_leaves_waiting_batch_ones_their_blocks() -> None:
    scheduler = make_scheduler(seqs=8, blocks=31, caching=False)  # 3 of the 30 are the batch's share
    scheduler.add(request(1, prompt=20, max_tokens=4, live=True))
    step(scheduler)
    scheduler.add(request(2, prompt=88, live=True))  # would leave 2
    scheduler.add(request(3, prompt=5))
    step(scheduler)
    assert running(scheduler) == [1, 3]
    run_dry(scheduler)


def test_a_live_request_beside_others_preempts_no_batch_one_within_the_share() -> None:
    scheduler = make_scheduler(seqs=8, blocks=31, caching=False)
    scheduler.add(request(1, prompt=8, max_tokens=4))
    scheduler.add(request(2, prompt=60, max_tokens=20, live=True))
    run_steps(scheduler, 2)
    scheduler.add(request(3, prompt=48, live=True))  # has no room beside the others
    assert step(scheduler).stats.preemptions == 0
    assert running(scheduler) == [2, 1]
    run_dry(scheduler)


def test_a_live_request_alone_preempts_batch_ones_within_the_share_too() -> None:
    scheduler = make_scheduler(seqs=8, blocks=31, caching=False)
    scheduler.add(request(1, prompt=8, max_tokens=4))
    step(scheduler)
    scheduler.add(request(2, prompt=116, max_tokens=2, live=True))
    assert step(scheduler).stats.preemptions == 1
    assert running(scheduler) == [2]
    run_dry(scheduler)


def test_while_live_requests_wait_batch_ones_start_within_their_share_of_slots() -> None:
    scheduler = make_scheduler(seqs=20, blocks=61, caching=False)  # two slots
    scheduler.add(request(1, prompt=120, max_tokens=20, live=True))
    run_steps(scheduler, 4)
    scheduler.add(request(2, prompt=140, live=True))
    for number in (3, 4, 5):
        scheduler.add(request(number, max_tokens=20))
    step(scheduler)
    assert running(scheduler) == [1, 3, 4]
    run_dry(scheduler)


def test_a_request_with_a_row_in_the_step_is_not_preempted_for_another_in_that_step() -> None:
    """A prompt of higher priority comes after the rows that decode."""
    scheduler = make_scheduler(blocks=55, caching=False)
    scheduler.add(request(1, prompt=11, max_tokens=40, live=True))
    step(scheduler)
    scheduler.add(request(2, prompt=200, max_tokens=4, live=True, priority=-1))
    run_steps(scheduler, 6)
    assert running(scheduler) == [2, 1]
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.counts.tolist(), scheduler._stats.preemptions) == ([1], 0)  # the prompt lacks a block
    scheduler.undo(plan)
    check_cache(scheduler)
    run_dry(scheduler)
