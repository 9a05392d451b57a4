"""Whole-file order, used well: of what lines have in common nearly all comes from a cache that
holds two of fifty prefixes.
"""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from jobs.batch.plan import PlanBuilder, PlanEntry, read_plan
from jobs.protocol.chat import ChatEndpoint
from tests.workers.engine.scheduling.simulation import BLOCK_SIZE, CheckedSimulation, Report, SimulatedLine

SYSTEMS = 50
SYSTEM_BLOCKS = 16
LINES = 1000


def shuffled(seed: int) -> list[tuple[int, SimulatedLine]]:
    """Lines in random order, each with the number of its system prompt."""
    draw = random.Random(seed)
    systems = [draw.choices(range(50_000), k=SYSTEM_BLOCKS * BLOCK_SIZE + 5) for _ in range(SYSTEMS)]
    lines = []
    for _ in range(LINES):
        number = draw.randrange(SYSTEMS)
        prompt = systems[number] + draw.choices(range(50_000), k=draw.randint(8, 40))
        lines.append((number, SimulatedLine(prompt, draw.randint(1, 60), max_tokens=draw.choice([32, 64, 128]))))
    return lines


def planned(lines: list[tuple[int, SimulatedLine]], folder: Path) -> list[tuple[int, SimulatedLine]]:
    """The same in the order of the plan, as `advance` feeds them and a worker claims them."""
    builder = PlanBuilder(folder)
    for index, (number, line) in enumerate(lines):
        messages = [
            {"role": "system", "content": f"You are number {number}. " * 40},
            {"role": "user", "content": str(line.prompt)},
        ]
        body = {"messages": messages, "max_tokens": line.max_tokens}
        builder.add(PlanEntry(index, 0, 0), ChatEndpoint(), "m", body)
    builder.write(str(folder / "plan.bin"))
    with open(folder / "plan.bin", "rb") as file:
        return [lines[entry.line] for entry in read_plan(file, 0, LINES)]


def share_of_possible(lines: list[tuple[int, SimulatedLine]], report: Report) -> float:
    """What the cache gave of what it could give: all whole blocks of a system prompt, but for the
    first line that has it.
    """
    groups = len({number for number, _ in lines})
    return sum(report.hits.values()) / ((len(lines) - groups) * SYSTEM_BLOCKS * BLOCK_SIZE)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.proof), 1])
@pytest.mark.parametrize("slots", [8, pytest.param(64, marks=pytest.mark.proof)])
def test_a_cache_of_two_prefixes_gives_nearly_all_that_fifty_could(
    tmp_path: Path, depth: int, slots: int, seed: int
) -> None:
    lines = planned(shuffled(seed), tmp_path)
    assert sum(left != right for (left, _), (right, _) in pairwise(lines)) == SYSTEMS - 1, seed
    report = CheckedSimulation([line for _, line in lines], 2 * SYSTEM_BLOCKS, slots=slots, depth=depth).run()
    assert share_of_possible(lines, report) >= 0.95, (seed, share_of_possible(lines, report))


def test_without_the_plan_there_is_little_to_find(seed: int) -> None:
    """So that the test above shows something."""
    lines = shuffled(seed)
    report = CheckedSimulation([line for _, line in lines], 2 * SYSTEM_BLOCKS, slots=8).run()
    assert share_of_possible(lines, report) < 0.5


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.proof), 1])
@pytest.mark.parametrize(
    "budget", [pytest.param(64, marks=pytest.mark.proof), 300, pytest.param(2048, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("in_order", [True, False])
def test_one_goes_ahead_and_no_other_computes_what_it_just_did(
    tmp_path: Path, depth: int, budget: int, in_order: bool, seed: int
) -> None:
    """Whatever the budget cuts a leader into: those that share its prefix wait until its blocks
    are there.
    """
    lines = shuffled(seed + 1)
    lines = planned(lines, tmp_path) if in_order else lines
    report = CheckedSimulation(
        [line for _, line in lines], 64 * SYSTEM_BLOCKS, slots=32, budget=budget, depth=depth
    ).run()
    for computed in report.computed_at.values():
        for (step, number), (next_step, other) in pairwise(computed):
            assert number == other or next_step > step + 1, (step, number, other)
