"""The draw on a CPU: row by row, so that all it works on stays in the processor's cache, and with exact noise for a few tokens only.

A token's score is z plus its noise. Where W is the sum of the weights exp(z) that a row's limits leave, m tokens on average have a score
above log(W / m), and the integers behind the noise tell which these may be without a logarithm. With m = 40 there is none but once in
e**40 draws, so the winner is among them; where there is none, all tokens are looked at. What is drawn is the same either way.

Top-p is decided for the winner alone: it lies in the nucleus if the weights above its own sum to less than top_p of all. If it does not,
neither does anything from its weight down, and the best score of the rest is looked at.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from workers.engine.sampling.noise import host_gumbel, rough_bits, token_steps, vocabulary_steps

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

_CANDIDATES = 40.0  # expected, for each that may be drawn: those outside the nucleus come on top
_FEW = 2048  # tokens whose exact noise costs less than looking for candidates
_NARROW = 0.25  # a nucleus of less is cut out first, lest almost all candidates lie outside
_LIST_COST = 4  # what a listed token costs, in tokens of a row that is looked at whole
_HALVINGS = 6
_LOWEST = -16.0


def draw_rows(z: Floats, floors: Floats, top_p: Floats, keys: NDArray[np.uint64]) -> Tokens:
    """One token for each row of z [R, vocab], whose largest is 0, of those at least `floors` [R] and in the nucleus of `top_p` [R].

    A row that is not numbers gives its argmax.
    """
    return np.array([_draw(*row) for row in zip(z, floors.tolist(), top_p.tolist(), keys, strict=True)], np.int64)


def _draw(z: Floats, floor: float, top_p: float, key: np.uint64) -> int:
    row = _Candidates(z, None) if floor == -math.inf else _kept(z, floor)
    if not row.total > 0:
        return int(z.argmax())
    goal = top_p * row.total if top_p < 1 else math.inf
    if top_p < _NARROW:
        row = row.narrowed(goal)
    return row.draw(key, goal)


def _kept(z: Floats, floor: float) -> _Candidates:
    kept = z >= floor
    if np.count_nonzero(kept) * _LIST_COST > len(z):
        return _Candidates(np.where(kept, z, np.float32(-np.inf)), None)
    tokens = np.flatnonzero(kept)
    return _Candidates(z[tokens], tokens)


class _Candidates:
    """z [C] of the tokens that a row may draw from, which are `tokens` [C] or the whole vocabulary, and their weights."""

    def __init__(self, z: Floats, tokens: Tokens | None) -> None:
        self.z, self.tokens = z, tokens
        self.steps = vocabulary_steps(len(z)) if tokens is None else token_steps(tokens)
        self.weights = np.exp(z)
        self.total = float(self.weights.sum())

    def narrowed(self, goal: float) -> _Candidates:
        """The same without some of the lowest, where the others' weights reach the goal."""
        low, high = -math.inf, 0.0
        for _ in range(_HALVINGS):
            middle = (max(low, _LOWEST) + high) / 2
            low, high = (middle, high) if self._above(middle) >= goal else (low, middle)
        if low == -math.inf:
            return self
        inside = np.flatnonzero(self.z > low)
        return _Candidates(self.z[inside], inside if self.tokens is None else self.tokens[inside])

    def draw(self, key: np.uint64, goal: float) -> int:
        """The token with the highest score of those above which less weight than `goal` lies."""
        if len(self.z) > _FEW:
            expected = _CANDIDATES * max(1.0, self.total / goal)
            # Rough bits lack the last one, and all this is in single precision: rather a few too many.
            limit = self.weights * np.float32(2.0**32 * 1.0001 * expected / self.total)
            limit += np.float32(2.0)
            best = self._best(key, goal, np.flatnonzero(rough_bits(key, self.steps) <= limit))
            if best is not None and best[1] > math.log(self.total / expected):
                return best[0]
        best = self._best(key, goal, np.arange(len(self.z)))
        assert best is not None  # the largest is in any nucleus
        return best[0]

    def _best(self, key: np.uint64, goal: float, which: Tokens) -> tuple[int, float] | None:
        """Token and score of the best of some candidates."""
        scores = self.z[which] + host_gumbel(key, self.steps[which])
        while which.size:
            first = int(scores.argmax())
            z = self.z[which[first]]
            if goal == math.inf or self._above(z) < goal:
                index = int(which[first])
                return (index if self.tokens is None else int(self.tokens[index])), float(scores[first])
            higher = self.z[which] > z
            which, scores = which[higher], scores[higher]
        return None

    def _above(self, z: float) -> float:
        """How much weight lies above z."""
        return float((self.weights * (self.z > z)).sum())
