"""What steps say about how long a full one may take."""

import pytest

from workers.engine.scheduling.step_time import Pace


def noted(*steps: tuple[float, int]) -> Pace:
    """Steps as seconds and tokens."""
    pace, computed = Pace(2048), 0
    for seconds, tokens in steps:
        computed += tokens
        pace.note(seconds, computed)
    return pace


def test_cold_steps_say_nothing() -> None:
    assert noted().full_step == 0
    assert noted((0.7, 15), (0.05, 1)).full_step == 0
    assert noted((30.0, 15), (0.05, 1), (0.0, 0), (0.1, 64)).full_step == pytest.approx(3.2)


def test_the_best_pace_counts_and_no_step_is_thought_shorter_than_one_of_late() -> None:
    cold = ((0.7, 15), (0.05, 1))
    assert noted(*cold, (0.01, 1), (0.1, 64), (0.01, 1)).full_step == pytest.approx(3.2)
    assert noted(*cold, (0.1, 64), (5.0, 64)).full_step == 5.0
    assert noted(*cold, (0.1, 64), (5.0, 64), *[(0.1, 64)] * 500).full_step == 5.0
    assert noted(*cold, (0.1, 64), (5.0, 64), *[(0.1, 64)] * 1100).full_step == pytest.approx(3.2)
