"""Predict the time of a step with a cost model."""

import math

import numpy as np
from numpy.typing import NDArray

COLD_STEPS = 2
"""Number of first steps that are not representative of later ones."""

# Seconds of a step, a decode row, a token of its context, a prompt token, a pair. Before the first
# measurement only their ratios matter, which are those of common models on a CPU
_FIRST_COSTS = 1e-3 * np.array([16.0, 1.0, 1 / 512, 1.0, 1 / 4096])
_CAREFUL_TOKENS = 32  # prompt tokens in a step before the first measurement
_RATE = 0.15  # weight of a measurement against the prediction
_MAX_CHANGE = 2.0  # largest factor by which a measured step counts as slower or faster than predicted

Counts = NDArray[np.int32]
Costs = NDArray[np.float64]


class StepCost:
    """Predict step times by a cost model, fitted to measured steps.

    A step costs a fixed time, plus a time for each decode row, each token of the rows' context,
    each prompt token, and each pair of a prompt token and a token that it attends to.

    A measurement scales each of these costs by its share of the prediction. So all stay positive,
    prompt costs change little in steps that mostly decode, and a cost that no step incurs keeps its
    ratio to the others.
    """

    def __init__(self) -> None:
        self._costs = _FIRST_COSTS.copy()
        self._steps = 0

    @property
    def known(self) -> bool:
        """Return whether any step after the first ones, which are slow, was measured."""
        return self._steps > COLD_STEPS

    def record(self, starts: Counts, counts: Counts, seconds: float) -> None:
        """Record how long a step of `counts` tokens from positions `starts` took."""
        self._steps += 1
        if not self.known:
            return
        parts = self._costs * _work(starts, counts)
        predicted = float(parts.sum())
        shares = parts / predicted
        if self._steps == COLD_STEPS + 1:
            self._costs *= seconds / predicted
        else:
            change = min(max(seconds / predicted, 1 / _MAX_CHANGE), _MAX_CHANGE) - 1
            self._costs *= 1 + _RATE * change * shares / float(shares @ shares)

    def predict(self, starts: Counts, counts: Counts) -> float:
        """Return the predicted seconds of a step."""
        return float(self._costs @ _work(starts, counts))

    def decode(self, rows: int, context: int) -> float:
        """Return the seconds of decode rows with `context` tokens in total, within a step."""
        return float(self._costs[1] * rows + self._costs[2] * context)

    @property
    def empty(self) -> float:
        """Return the seconds of a step without any rows."""
        return float(self._costs[0])

    def prompt(self, start: int, count: int) -> float:
        """Return the seconds of `count` prompt tokens from position `start` on, within a step."""
        return float(self._costs[3] * count + self._costs[4] * count * (start + count / 2))

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return how many prompt tokens from position `start` on take `seconds`; few before the
        first measurement.
        """
        token, pair = float(self._costs[3]), float(self._costs[4])
        token += pair * start
        tokens = int(2 * seconds / (token + math.sqrt(token * token + 2 * pair * seconds))) if seconds > 0 else 0
        return tokens if self.known else min(tokens, _CAREFUL_TOKENS)


def _work(starts: Counts, counts: Counts) -> Costs:
    """Return how often a step incurs each of the costs."""
    decodes = counts == 1
    rows, context = np.count_nonzero(decodes), starts @ decodes
    pairs = counts @ (starts + counts / 2) - context - rows / 2
    return np.array([1.0, rows, context, counts.sum() - rows, pairs])
