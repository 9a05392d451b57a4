"""Draw tokens on a CPU: a few rows at a time, on the model's number of threads, with exact noise
for only a few tokens.

A token's score is z plus its noise. If W is the sum of the weights exp(z) within a row's limits, m
tokens on average have a score above log(W / m), and the integers behind the noise show the possible
ones without a logarithm. With m = 40 there is no such token once in e**40 draws, so the winner is
among them; otherwise all tokens are examined. Either way gives the same token.

Top-p is checked for the winner only: it is in the nucleus if the weights above its own sum to less
than top_p of all. If it is not, no token of at most its weight is, and the best score among the
rest is checked next.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from workers.engine.sampling.limits import SMALLEST
from workers.engine.sampling.noise import host_gumbel, rough_bits, token_steps, vocabulary_steps

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

_CANDIDATES = 40.0  # expected candidates in the nucleus; tokens outside it are additional
# Rows processed together: releasing the interpreter lock every few microseconds gains nothing
_BLOCK = 4
_FEW = 2048  # for fewer tokens, exact noise costs less than a search for candidates
_NARROW = 0.25  # a smaller nucleus is computed first, since almost all candidates would be outside
_LIST_COST = 4  # cost of a listed token, in tokens of a row examined whole
_STRIDE = 64  # one token in this many is sampled to estimate how many are ruled out
_HALVINGS = 6
_LOWEST = -16.0


def draw_rows(z: Floats, floors: Floats, top_p: Floats, keys: NDArray[np.uint64], threads: int = 1) -> Tokens:
    """Draw one token for each row of z [R, vocab], whose largest value is 0.

    Tokens must be at least `floors` [R] and in the nucleus of `top_p` [R]. A row with NaN gives its
    argmax.
    """
    blocks = [slice(first, first + _BLOCK) for first in range(0, len(z), _BLOCK)]
    spread = map if threads == 1 or len(blocks) == 1 else _pool(threads).map
    drawn = spread(lambda block: _draw(z[block], floors[block], top_p[block], keys[block]), blocks)
    return np.array([token for tokens in drawn for token in tokens], np.int64)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "draw")


def _draw(z: Floats, floors: Floats, top_p: Floats, keys: NDArray[np.uint64]) -> list[int]:
    """Return the tokens of a few rows.

    Rows without a limit that leaves few tokens are processed together.
    """
    floors = np.where(_mostly_ruled_out(z), np.maximum(floors, SMALLEST), floors)
    wide = np.nonzero((floors == -np.inf) & (top_p >= _NARROW))[0]
    part = z if len(wide) == len(z) else z[wide]
    weights = np.exp(part)
    totals = weights.sum(-1)
    goals = np.where(top_p[wide] < 1, top_p[wide] * totals, np.float32(np.inf))
    near = _near(weights, np.minimum(totals, goals), keys[wide], vocabulary_steps(z.shape[1]))
    tokens = {
        row: _Candidates(part[i], None, weights[i]).draw(keys[row], float(goals[i]), near[i])
        if totals[i] > 0
        else int(part[i].argmax())
        for i, row in enumerate(wide.tolist())
    }
    return [
        tokens[row] if row in tokens else _draw_limited(z[row], float(floors[row]), float(top_p[row]), keys[row])
        for row in range(len(z))
    ]


def _mostly_ruled_out(z: Floats) -> NDArray[np.bool_]:
    """Return, by a sample, for which rows a list of the remaining tokens pays, as after a grammar's
    mask; [r].
    """
    sample = z[:, ::_STRIDE]
    few: NDArray[np.bool_] = (sample >= SMALLEST).mean(1) < 1 / _LIST_COST
    return few


def _draw_limited(z: Floats, floor: float, top_p: float, key: np.uint64) -> int:
    row = _kept(z, floor)
    if not row.total > 0:
        return int(z.argmax())
    goal = top_p * row.total if top_p < 1 else math.inf
    if top_p < _NARROW:
        row = row.narrowed(goal)
    return row.draw(key, goal)


def _near(weights: Floats, goals: Floats, keys: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which tokens with weights [r, C] may have a score above the log of a fortieth of their
    row's goal [r].
    """
    # Rough bits lack the last one, and this uses single precision: a few too many rather than too
    # few.
    limit = weights * (np.float32(2.0**32 * 1.0001 * _CANDIDATES) / goals)[:, None]
    limit += np.float32(2.0)
    return rough_bits(keys[:, None], steps) <= limit


def _kept(z: Floats, floor: float) -> _Candidates:
    if floor == -math.inf:
        return _Candidates(z, None)
    kept = z >= floor
    if np.count_nonzero(kept) * _LIST_COST > len(z):
        return _Candidates(np.where(kept, z, np.float32(-np.inf)), None)
    tokens = np.flatnonzero(kept)
    return _Candidates(z[tokens], tokens)


class _Candidates:
    """The tokens that a row may draw from: their z [C], their ids `tokens` [C] or the whole
    vocabulary, and their weights.
    """

    def __init__(self, z: Floats, tokens: Tokens | None, weights: Floats | None = None) -> None:
        self.z, self.tokens = z, tokens
        self.steps = vocabulary_steps(len(z)) if tokens is None else token_steps(tokens)
        self.weights = np.exp(z) if weights is None else weights
        self.total = float(self.weights.sum())

    def narrowed(self, goal: float) -> _Candidates:
        """Return the candidates without some of the lowest, if the others' weights reach the
        goal.
        """
        low, high = -math.inf, 0.0
        for _ in range(_HALVINGS):
            middle = (max(low, _LOWEST) + high) / 2
            low, high = (middle, high) if self._above(middle) >= goal else (low, middle)
        if low == -math.inf:
            return self
        inside = np.flatnonzero(self.z > low)
        return _Candidates(self.z[inside], inside if self.tokens is None else self.tokens[inside])

    def draw(self, key: np.uint64, goal: float, near: NDArray[np.bool_] | None = None) -> int:
        """Return the token with the highest score among those with less weight than `goal` above
        them; `near` is the result of `_near`, if known.
        """
        least = min(self.total, goal)
        if near is None and len(self.z) > _FEW:
            near = _near(self.weights[None], np.array([least], np.float32), np.array([key]), self.steps)[0]
        if near is not None:
            best = self._best(key, goal, np.flatnonzero(near))
            if best is not None and best[1] > math.log(least / _CANDIDATES):
                return best[0]
        best = self._best(key, goal, np.arange(len(self.z)))
        assert best is not None  # the largest is in every nucleus
        return best[0]

    def _best(self, key: np.uint64, goal: float, which: Tokens) -> tuple[int, float] | None:
        """Return token and score of the best among some candidates."""
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
        """Return the total weight above z."""
        return float((self.weights * (self.z > z)).sum())
