"""Which candidates a row may draw from: min_p, top-k and top-p as one threshold per row, without sorting the vocabulary.

Candidates equal to the threshold are kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages import SamplingParams

_FIRST_CANDIDATES = 128
_BINS = 4096
_BINNED = 32.0  # how far below the largest value the bins reach; the last one takes the rest, which is next to nothing


class Limits:
    """The three limits of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._floor = np.full(num_slots, -np.inf, np.float32)  # min_p, as a distance from the largest logit
        self._top_k = np.full(num_slots, vocab_size, np.int64)
        self._top_p = np.ones(num_slots, np.float32)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._floor[slot] = math.log(params.min_p) if params.min_p else -math.inf
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = params.top_p

    def limited(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows have a limit; [R]."""
        return (self._floor[slots] > -np.inf) | (self._top_k[slots] < self._vocab_size) | (self._top_p[slots] < 1)

    def thresholds(self, z: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """The smallest value that each row of z [R, vocab], whose largest is 0, keeps; float32 [R, 1]."""
        threshold = _column(self._floor[slots], z)
        top_k = self._top_k[slots]
        some = top_k < self._vocab_size
        if some.any():
            largest = z.topk(int(top_k[some].max()), -1).values
            of_k = largest.gather(1, _column(top_k, z).clamp(max=largest.shape[1]) - 1)
            threshold = torch.where(_column(some, z), torch.maximum(threshold, of_k), threshold)
        if (self._top_p[slots] < 1).any():
            threshold = top_p_threshold(z, threshold, _column(self._top_p[slots], z))
        return threshold


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def top_p_threshold(z: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """Raises each row's threshold to the smallest value of its nucleus: the fewest largest candidates whose probability reaches top_p.

    z [R, vocab] with no value far above 0, threshold and top_p [R, 1]. Looks at the largest few candidates first, and at all of a row
    only where its nucleus is wider.
    """
    total = torch.where(z >= threshold, z.exp(), 0).sum(-1, keepdim=True)
    if z.is_cuda:
        return _nucleus(z.sort(-1, descending=True).values, total, threshold, top_p)[0]
    lowest, reached = _nucleus(z.topk(min(_FIRST_CANDIDATES, z.shape[1]), -1).values, total, threshold, top_p)
    for row in (~reached[:, 0]).nonzero()[:, 0].tolist():
        lowest[row] = _wide_nucleus(z[row].numpy(), float(threshold[row]), float(top_p[row]))
    return lowest


def _wide_nucleus(z: NDArray[np.float32], threshold: float, top_p: float) -> float:
    """The same for one row [vocab]: a histogram of the probability finds the bin in which the nucleus ends, and only that is sorted."""
    bins = np.clip(z * np.float32(-_BINS / _BINNED), 0, _BINS - 1).astype(np.int32)  # bin 0 holds the largest
    weight = np.where(z >= threshold, np.exp(z), np.float32(0))
    mass = np.bincount(bins, weights=weight, minlength=_BINS)
    before = np.cumsum(mass) - mass
    goal = top_p * mass.sum()
    last = np.nonzero((before < goal) & (mass > 0))[0][-1]
    members = np.sort(z[(bins == last) & (weight > 0)])[::-1]
    weights = np.exp(members.astype(np.float64))
    return float(members[before[last] + np.cumsum(weights) - weights < goal][-1])


def _nucleus(ordered: Tensor, total: Tensor, threshold: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The nucleus' smallest value, and whether it lies inside `ordered`, a row's largest values in descending order; each [R, 1]."""
    probabilities = torch.where(ordered >= threshold, ordered.exp() / total, 0)
    before = probabilities.cumsum(-1) - probabilities
    kept = ((before < top_p) & (ordered >= threshold)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(threshold, ordered.gather(1, kept - 1)), kept < ordered.shape[1]
