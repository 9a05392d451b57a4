"""How large steps may be, and how long they may take."""

import math

_STEPS_TO_DOUBLE = 8
_MOST_STEPS_TO_DOUBLE = 512
_COLD_STEPS = 2
_RECENT_STEPS = 512


class StepSize:
    """The tokens of a step: half as many when one does not fit into memory, twice as many again
    after some that did.

    Each time that turns out to have been too early, twice as many steps are waited for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = most
        self._good_steps = 0
        self._steps_to_double = _STEPS_TO_DOUBLE
        self._doubled = False

    def did_not_fit(self, tokens: int) -> int:
        """A step of so many tokens, at least 2; returns how many the next one may have."""
        if self._doubled:
            self._steps_to_double = min(2 * self._steps_to_double, _MOST_STEPS_TO_DOUBLE)
        self._doubled = False
        self._good_steps = 0
        self._tokens = tokens // 2
        return self._tokens

    def fitted(self) -> int:
        """A step; returns how many tokens the next one may have."""
        if self._tokens == self._most:
            self._steps_to_double = _STEPS_TO_DOUBLE
            return self._most
        self._good_steps += 1
        if self._good_steps >= self._steps_to_double:
            self._good_steps = 0
            self._doubled = True
            self._tokens = min(self._most, 2 * self._tokens)
        return self._tokens


class Pace:
    """How long a full step may take, by the longest of late and by the least that a token took:
    short steps say little about a long one.

    The first steps say nothing, for they load what later ones find loaded. A worker makes them
    itself, before it takes requests.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._full = max_num_batched_tokens
        self._longest = [0.0, 0.0]  # of the steps counted now, and of those counted before
        self._per_token = math.inf
        self._computed = 0
        self._steps = 0

    def note(self, seconds: float, computed_tokens: int) -> None:
        """A turn of the loop, and how many tokens all steps together have computed."""
        tokens, self._computed = computed_tokens - self._computed, computed_tokens
        if not tokens:
            return
        self._steps += 1
        if self._steps <= _COLD_STEPS:
            return
        if self._steps % _RECENT_STEPS == 0:
            self._longest = [0.0, self._longest[0]]
        self._longest[0] = max(self._longest[0], seconds)
        self._per_token = min(self._per_token, seconds / tokens)

    @property
    def full_step(self) -> float:
        """Seconds; 0 as long as nothing is known."""
        return max(*self._longest, self._per_token * self._full) if self._steps > _COLD_STEPS else 0.0
