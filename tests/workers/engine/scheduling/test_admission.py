"""Admission where KV blocks are scarce: what steps and preemptions cost together, and what lengths
are expected. All draws are seeded.
"""

import random

import numpy as np
import pytest

from benchmarks.admission import KINDS, LENGTHS, STEP_COSTS, figures_of, forecast_at
from tests.workers.engine.scheduling.simulation import BLOCK_SIZE, CheckedSimulation, Report, SimulatedLine
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams
from workers.engine.scheduling.admission import PlainAdmission, choose_policy
from workers.engine.scheduling.forecast import OutputLengths
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.request import RequestState

SLOTS = 64


def lines_of(kind: str, count: int = 1000, seed: int = 1, *, known: bool = False) -> list[SimulatedLine]:
    """Prompts without anything in common."""
    draw = random.Random(seed)
    return [
        SimulatedLine(
            draw.choices(range(50_000), k=draw.randint(40, 120)),
            min(512, max(1, int(LENGTHS[kind](draw)))),
            known=known,
        )
        for _ in range(count)
    ]


def blocks_of(lines: list[SimulatedLine], requests: float) -> int:
    """What so many requests take when each is as long as it gets."""
    each = sum(-(-(len(line.prompt) + line.output) // BLOCK_SIZE) for line in lines) / len(lines)
    return int(each * requests)


def in_a_quarter(lines: list[SimulatedLine], depth: int) -> Report:
    """On a CPU."""
    blocks = blocks_of(lines, SLOTS / 4)
    return CheckedSimulation(
        lines, blocks, slots=SLOTS, depth=depth, admission=lambda cache: forecast_at(STEP_COSTS["CPU"], cache)
    ).run()


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_costs_a_hundredth_less(kind: str) -> None:
    """Not plain admission, nor by the mean length of ended outputs, nor the forecast of before."""
    for machine, figures in figures_of(kind, range(1, 4)).items():
        assert figures["forecast"] <= 1.01, (machine, figures)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["lognormal", "equal"])
def test_no_policy_costs_a_hundredth_less_in_a_short_run(kind: str) -> None:
    for machine, figures in figures_of(kind, range(1, 3), 300).items():
        assert figures["forecast"] <= 1.01, (machine, figures)


@pytest.mark.parametrize("step_cost", [8.0, pytest.param(2048.0, marks=pytest.mark.proof)])
def test_steps_that_cost_much_are_saved_at_the_price_of_preemptions(step_cost: float) -> None:
    lines = lines_of("narrow", 300)
    blocks = blocks_of(lines, SLOTS / 4)
    report = CheckedSimulation(lines, blocks, depth=1, admission=lambda cache: forecast_at(step_cost, cache)).run()
    plain = CheckedSimulation(lines, blocks, depth=1, admission=lambda _: PlainAdmission()).run()
    if step_cost > 1000:
        assert (report.steps, report.computed) == (plain.steps, plain.computed)
    else:
        assert report.steps > plain.steps
        assert report.recomputed_share < 0.02 < plain.recomputed_share


@pytest.mark.parametrize(("blocks", "plain"), [(16, True), (15, False)])
def test_lengths_are_forecast_where_not_every_slot_has_room_for_the_longest(blocks: int, plain: bool) -> None:
    """Four slots of 64 tokens take 16 blocks."""
    policy = choose_policy(KVCache(blocks + 1, BLOCK_SIZE), 4, 64)
    assert isinstance(policy, PlainAdmission) == plain


@pytest.mark.proof
def test_many_come_in_at_a_step_where_many_run() -> None:
    """Two for each three steps or so: a pace of whole steps would let in half as many."""
    draw = random.Random(4)
    lines = [SimulatedLine(draw.choices(range(50_000), k=100), max(1, int(draw.gauss(150, 15)))) for _ in range(1200)]
    report = CheckedSimulation(
        lines, 1400, slots=256, admission=lambda cache: forecast_at(STEP_COSTS["CPU"], cache)
    ).run()
    assert report.recomputed_share < 0.02
    assert report.rows / report.steps > 0.8 * 1400 / 12, (
        f"{report.rows / report.steps:.0f} rows in {report.steps} steps"
    )


def test_a_request_with_stop_strings_is_expected_to_be_like_its_batch() -> None:
    """By a stop string, of which the engine does not know; without one, nothing but the limit is
    left.
    """
    params = SamplingParams(2048, ignore_eos=True)
    batch_ids = [
        RequestState(
            EngineRequest(1, [1], [], params, batch_id="a", stop_strings=stops), 1, 4096, frozenset([9])
        ).batch_id
        for stops in (True, False)
    ]
    assert batch_ids == ["a", None]


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_lengths_that_are_known_need_no_guess(depth: int) -> None:
    """Longest first, as a plan has them."""
    lines = sorted(lines_of("uniform", known=True), key=lambda line: -line.output)
    report = in_a_quarter(lines, depth)
    assert report.recomputed_share < 0.005, f"{report.recomputed_share:.2%} with {report.stats.preemptions} preemptions"
    assert report.rows / report.steps > 0.9 * SLOTS / 4, report.rows / report.steps


def test_live_requests_come_in_as_ever() -> None:
    """Each tenth is live: none of them waits while batch requests, which came before, run on."""
    draw = random.Random(2)
    lines = [SimulatedLine(line.prompt, line.output, live=draw.random() < 0.1) for line in lines_of("lognormal", 600)]
    report = in_a_quarter(lines, 0)
    place = {number: at for at, number in enumerate(report.order)}
    late = {
        live: [place[number] - number for number, line in enumerate(lines) if line.live == live]
        for live in (True, False)
    }
    assert sum(late[True]) / len(late[True]) < sum(late[False]) / len(late[False]) - SLOTS / 4
    assert report.recomputed_share < 0.05


def ended(output: int, finish: Finish = Finish.STOP, batch_id: str = "a") -> RequestState:
    made = RequestState(
        EngineRequest(1, [1], [2] * output, SamplingParams(4000), batch_id=batch_id), 1, 4096, frozenset([9])
    )
    made.finish = finish
    return made


def longer_than(lengths: OutputLengths, tokens: int, batch_id: str = "a", running: tuple[int, ...] = ()) -> float:
    return float(np.exp(np.interp(tokens, *lengths.log_survival(batch_id, running))))


def test_output_lengths_are_learned_by_batch() -> None:
    lengths, draw = OutputLengths(), random.Random(3)
    for _ in range(1000):
        lengths.learn(ended(max(1, int(draw.gauss(100, 20)))))
        lengths.learn(ended(max(1, int(draw.gauss(400, 20))), batch_id="b"))
    assert longer_than(lengths, 100) == pytest.approx(0.5, abs=0.1)
    assert longer_than(lengths, 200) < 0.02
    assert longer_than(lengths, 300, "b") > 0.95
    assert 0.3 < longer_than(lengths, 200, "unknown") < 0.7


def test_lengths_of_long_ago_are_forgotten() -> None:
    lengths = OutputLengths()
    for output in (400,) * 500 + (100,) * 500:
        lengths.learn(ended(output))
    assert longer_than(lengths, 200) < 0.01


def test_outputs_that_were_cut_count_as_longer() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(ended(64, Finish.LENGTH))
        lengths.learn(ended(300))
    assert longer_than(lengths, 200) > 0.9


def test_outputs_that_were_all_cut_leave_an_estimate() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.learn(ended(64, Finish.LENGTH))
    assert longer_than(lengths, 64) > 0.9
    assert longer_than(lengths, 4000) < longer_than(lengths, 1000) <= 1.0


def test_running_requests_keep_the_first_to_end_from_counting_for_all() -> None:
    lengths = OutputLengths()
    for _ in range(4):
        lengths.learn(ended(10))
    assert longer_than(lengths, 50) < 0.45
    assert longer_than(lengths, 50, running=(60,) * 60) > 0.85


def test_a_running_batch_is_not_dropped_for_newer_ones() -> None:
    lengths = OutputLengths()
    for other in range(200):
        lengths.learn(ended(400))
        lengths.learn(ended(3, batch_id=f"small {other}"))
    assert longer_than(lengths, 300) > 0.9


def test_what_says_nothing_about_length_is_not_learned() -> None:
    lengths = OutputLengths()
    before = longer_than(lengths, 100)
    lengths.learn(ended(10, Finish.ERROR))
    lengths.learn(ended(0, Finish.ABORT))
    assert longer_than(lengths, 100) == before
