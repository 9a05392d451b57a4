"""The cost model of steps."""

import random
import time

import numpy as np
import pytest

from workers.engine.scheduling.step_cost import Counts, StepCost

# Seconds of a step, a decode row, a token of its context, a prompt token, a pair
CPU = (0.016, 0.5e-3, 0.5e-6, 0.42e-3, 0.11e-6)
GPU = (4e-3, 2e-6, 3e-8, 25e-6, 1e-9)


def mixed(rows: int, context: int, *chunks: tuple[int, int]) -> tuple[Counts, Counts]:
    """Starts and counts of decode rows and of chunks of prompts."""
    starts = [context] * rows + [start for start, _ in chunks]
    return np.array(starts, np.int32), np.array([1] * rows + [count for _, count in chunks], np.int32)


def seconds_of(device: tuple[float, ...], starts: Counts, counts: Counts) -> float:
    step, row, token, prompt, pair = device
    return step + sum(
        row + token * start if count == 1 else prompt * count + pair * count * (start + count / 2)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    )


def learned(device: tuple[float, ...], steps: int, noise: float, seed: int = 1) -> StepCost:
    """From a batch of prompts in chunks, in steps of random sizes."""
    draw, cost = random.Random(seed), StepCost()
    for _ in range(steps):
        rows, start = draw.randint(0, 64), draw.randint(0, 900)
        step = mixed(rows, draw.randint(100, 1000), *[(start, draw.randint(2, 400))] * draw.randint(0, 3))
        if len(step[0]):
            cost.record(*step, seconds_of(device, *step) * draw.uniform(1 - noise, 1 + noise))
    return cost


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_steps_of_other_sizes_are_predicted(device: tuple[float, ...], noise: float) -> None:
    cost = learned(device, 400, noise)
    for step in (
        mixed(64, 950),
        mixed(1, 100),
        mixed(20, 500, (0, 128)),
        mixed(64, 900, (800, 100)),
        mixed(0, 0, (0, 2000)),
    ):
        assert cost.predict(*step) == pytest.approx(seconds_of(device, *step), rel=0.25 + noise)


def test_a_step_that_hangs_once_is_soon_forgotten() -> None:
    cost, step = learned(CPU, 200, 0.0), mixed(30, 500, (0, 200))
    before = cost.predict(*step)
    cost.record(*step, 100 * before)
    assert cost.predict(*step) < 1.2 * before
    for _ in range(20):
        cost.record(*step, before)
    assert cost.predict(*step) == pytest.approx(before, rel=0.02)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    cost, step = learned(CPU, 200, 0.0), mixed(30, 500, (0, 200))
    slower = 3 * cost.predict(*step)
    for _ in range(30):
        cost.record(*step, slower)
    assert cost.predict(*step) == pytest.approx(slower, rel=0.05)


def test_decoding_alone_leaves_the_costs_of_prompts_alone() -> None:
    cost = learned(CPU, 200, 0.0)
    before = cost.prompt(0, 100)
    for _ in range(1000):
        step = mixed(64, 900)
        cost.record(*step, seconds_of(CPU, *step))
    assert cost.prompt(0, 100) == before


@pytest.mark.parametrize("start", [0, 500, 100_000])
def test_a_chunk_of_as_many_tokens_as_there_is_time_for_takes_that_time(start: int) -> None:
    cost = learned(CPU, 200, 0.0)
    tokens = cost.tokens_within(0.1, start)
    assert cost.prompt(start, tokens) <= 0.1 < cost.prompt(start, tokens + 1)
    assert cost.tokens_within(0.1, start + 1000) < tokens
    assert cost.tokens_within(0.0, start) == cost.tokens_within(-1.0, start) == 0


def test_chunks_are_small_until_a_step_was_measured_that_is_not_cold() -> None:
    cost = StepCost()
    for _ in range(2):
        cost.record(*mixed(0, 0, (0, 15)), 9.0)
        assert not cost.known
        assert cost.tokens_within(1e9, 0) == 32
    step = mixed(0, 0, (0, 100))
    cost.record(*step, 1e-3)
    assert cost.predict(*step) == pytest.approx(1e-3)
    assert cost.tokens_within(1.0, 0) > 10_000


def test_recording_is_quick() -> None:
    cost, step = StepCost(), mixed(1024, 500, (0, 100))
    for _ in range(3):
        cost.record(*step, 0.01)
    began = time.process_time()
    for _ in range(1000):
        cost.record(*step, 0.01)
    assert time.process_time() - began < 0.5
