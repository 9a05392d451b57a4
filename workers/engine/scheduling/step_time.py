"""Adapt the token budget of a step, and estimate the time of a full step."""

import math

from workers.engine.scheduling.step_cost import COLD_STEPS

_STEPS_TO_DOUBLE = 8
_MOST_STEPS_TO_DOUBLE = 512
_RECENT_STEPS = 512


class AdaptiveBatchSize:
    """Adapt the token budget: halve it when a step runs out of memory, double it after good steps.

    After each failed doubling, the next one needs twice as many good steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = most
        self._good_steps = 0
        self._steps_to_double = _STEPS_TO_DOUBLE
        self._doubled = False

    def did_not_fit(self, tokens: int) -> int:
        """Record that a step of `tokens`, at least 2, did not fit; return the next budget."""
        if self._doubled:
            self._steps_to_double = min(2 * self._steps_to_double, _MOST_STEPS_TO_DOUBLE)
        self._doubled = False
        self._good_steps = 0
        self._tokens = tokens // 2
        return self._tokens

    def fitted(self) -> int:
        """Record that a step fitted; return the next budget."""
        if self._tokens == self._most:
            self._steps_to_double = _STEPS_TO_DOUBLE
            return self._most
        self._good_steps += 1
        if self._good_steps >= self._steps_to_double:
            self._good_steps = 0
            self._doubled = True
            self._tokens = min(self._most, 2 * self._tokens)
        return self._tokens


class StepTimeEstimate:
    """Estimate the longest time of a full step.

    The estimate is the longest recent step, or the shortest time per token times a full budget,
    since short steps predict long ones badly. The first steps do not count, since they also load
    code and data. A worker runs them itself before it claims requests.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._full = max_num_batched_tokens
        self._longest = [0.0, 0.0]  # of the steps counted now, and of those counted before
        self._per_token = math.inf
        self._computed = 0
        self._steps = 0

    def record(self, seconds: float, computed_tokens: int) -> None:
        """Record an iteration of the loop; `computed_tokens` is the total of all steps so far."""
        tokens, self._computed = computed_tokens - self._computed, computed_tokens
        if not tokens:
            return
        self._steps += 1
        if self._steps <= COLD_STEPS:
            return
        if self._steps % _RECENT_STEPS == 0:
            self._longest = [0.0, self._longest[0]]
        self._longest[0] = max(self._longest[0], seconds)
        self._per_token = min(self._per_token, seconds / tokens)

    @property
    def full_step(self) -> float:
        """Return the estimate in seconds, or 0 before any measurement."""
        return max(*self._longest, self._per_token * self._full) if self._steps > COLD_STEPS else 0.0
