"""The estimate of how long a full step may take."""

import pytest

from workers.engine.scheduling.step_time import StepTimeEstimate


def recorded(*steps: tuple[float, int]) -> StepTimeEstimate:
    """Steps as seconds and tokens."""
    estimate, computed = StepTimeEstimate(2048), 0
    for seconds, tokens in steps:
        computed += tokens
        estimate.record(seconds, computed)
    return estimate


def test_cold_steps_do_not_count() -> None:
    assert recorded().full_step == 0
    assert recorded((0.7, 15), (0.05, 1)).full_step == 0
    assert recorded((30.0, 15), (0.05, 1), (0.0, 0), (0.1, 64)).full_step == pytest.approx(3.2)


def test_the_least_time_per_token_counts_and_no_estimate_is_below_a_recent_step() -> None:
    cold = ((0.7, 15), (0.05, 1))
    assert recorded(*cold, (0.01, 1), (0.1, 64), (0.01, 1)).full_step == pytest.approx(3.2)
    assert recorded(*cold, (0.1, 64), (5.0, 64)).full_step == 5.0
    assert recorded(*cold, (0.1, 64), (5.0, 64), *[(0.1, 64)] * 500).full_step == 5.0
    assert recorded(*cold, (0.1, 64), (5.0, 64), *[(0.1, 64)] * 1100).full_step == pytest.approx(3.2)
