"""What a step plan says of its rows."""

import numpy as np
import pytest

from workers.engine.messages.ranks import MaskFrame, PlanFrame
from workers.engine.messages.step import StepPlan, TokenMasks


@pytest.mark.parametrize(
    ("samples", "rows", "later"),
    [
        ([1, 1, 1], [0, 1, 2], [0, 0, 0]),
        ([0, 1, 0, 1], [1, 3], [0, 0]),
        ([0, 2, 1, 3], [1, 1, 2, 3, 3, 3], [1, 0, 0, 2, 1, 0]),
        ([0, 0], [], []),
    ],
)
def test_a_row_samples_after_each_of_its_last_tokens(samples: list[int], rows: list[int], later: list[int]) -> None:
    found = plan(samples).sampled()
    assert [part.tolist() for part in found] == [rows, later]


def test_a_plan_reaches_the_other_ranks_as_it_is() -> None:
    sent = plan([0, 2, 1])
    sent.guided = [2]
    received = PlanFrame.of(sent).plan()
    assert received.guided == [2]
    for name in ("slots", "starts", "counts", "samples"):
        assert np.array_equal(getattr(received, name), getattr(sent, name))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_masks_reach_the_other_ranks_as_they_are(rows: int) -> None:
    sent = TokenMasks(np.arange(rows), np.arange(rows * 5, dtype=np.int32).reshape(rows, 5))
    received = MaskFrame.of(sent).token_masks()
    assert np.array_equal(received.rows, sent.rows)
    assert np.array_equal(received.masks, sent.masks) or not rows


def plan(samples: list[int]) -> StepPlan:
    numbers = np.arange(len(samples), dtype=np.int32)
    return StepPlan(0, [], [], numbers, 10 * numbers, numbers + 4, np.array(samples, np.int32))
