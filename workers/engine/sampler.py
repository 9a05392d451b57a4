"""Whole-batch sampling: temperature, top-k, top-p, then the argmax of logits plus noise, which is a draw from what is left.

A stage that no row of the step uses costs nothing: all greedy is one argmax. Parameters live in tables by slot. Top-k and top-p become one
threshold per row without sorting the vocabulary, ties at the threshold are kept, and noise is computed for kept candidates only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages import SamplingParams
from workers.engine.noise import gumbel, request_keys, signed_seed

_FIRST_CANDIDATES = 128
_BINS = 4096
_BINNED = 32.0  # how far below the largest value the bins reach; the last one takes the rest, which is next to nothing
_LIST_COST = 8  # what a listed candidate costs, in tokens of a row that is computed whole
_NOISE_ROWS = 4  # unfiltered rows whose noise is computed at once on a CPU, so that its temporaries stay in the processor's cache


class Sampler:
    """Parameter tables for `num_slots` slots, and the draw."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._seed = np.zeros(num_slots, np.int64)
        self._choice = np.zeros(num_slots, np.int64)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrites a slot's parameters."""
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._seed[slot] = signed_seed(params.seed)
        self._choice[slot] = params.choice

    def sample(self, logits: Tensor, slots: NDArray[np.int32], indices: NDArray[np.int64]) -> Tensor:
        """int64 [R] tokens from float32 logits [R, vocab]; `indices` int64 [R] are the output indices of the tokens drawn.

        Changes `logits`.
        """
        drawn = np.nonzero(self._temperature[slots] > 0)[0]
        if drawn.size == 0:
            return logits.argmax(-1)
        slots, device = slots[drawn], logits.device
        rows = torch.from_numpy(drawn).to(device)
        z = logits if drawn.size == logits.shape[0] else logits[rows]
        # From the largest down, so that a tiny temperature cannot overflow.
        z = z.sub_(z.amax(-1, keepdim=True)).div_(self._column(self._temperature, slots, device))
        keys = request_keys(*(torch.from_numpy(x).to(device) for x in (self._seed[slots], self._choice[slots], indices[drawn])))
        if drawn.size == logits.shape[0]:
            return self._draw(z, keys, slots)
        tokens = logits.argmax(-1)
        tokens[rows] = self._draw(z, keys, slots)
        return tokens

    def _draw(self, z: Tensor, keys: Tensor, slots: NDArray[np.int32]) -> Tensor:
        vocab = z.shape[1]
        limited = (self._top_p[slots] < 1) | ((self._top_k[slots] > 0) & (self._top_k[slots] < vocab))
        if not limited.any():
            return draw_all(z, keys)
        if limited.all():
            return draw_kept(z, self._thresholds(z, slots), keys)
        tokens = torch.empty_like(keys)
        for chosen, some in ((limited, True), (~limited, False)):
            rows = torch.from_numpy(np.nonzero(chosen)[0]).to(z.device)
            part = z[rows]
            tokens[rows] = draw_kept(part, self._thresholds(part, slots[chosen]), keys[rows]) if some else draw_all(part, keys[rows])
        return tokens

    def _thresholds(self, z: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """The smallest value of z that each row keeps; float32 [R, 1]."""
        vocab = z.shape[1]
        top_k = np.where(self._top_k[slots] > 0, np.minimum(self._top_k[slots], vocab), vocab)
        threshold = torch.full((z.shape[0], 1), -torch.inf, device=z.device)
        if (top_k < vocab).any():
            k = torch.from_numpy(top_k).to(z.device)[:, None]
            largest = z.topk(int(top_k[top_k < vocab].max()), -1).values
            threshold = torch.where(k < vocab, largest.gather(1, k.clamp(max=largest.shape[1]) - 1), threshold)
        if (self._top_p[slots] < 1).any():
            threshold = top_p_threshold(z, threshold, self._column(self._top_p, slots, z.device))
        return threshold

    def _column(self, table: NDArray[np.float32], slots: NDArray[np.int32], device: torch.device) -> Tensor:
        return torch.from_numpy(table[slots]).to(device)[:, None]


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


def draw_all(z: Tensor, keys: Tensor) -> Tensor:
    """One token per row of z [R, vocab], every token a candidate; int64 [R]."""
    tokens = torch.arange(z.shape[1], device=z.device)
    step = z.shape[0] if z.is_cuda else _NOISE_ROWS
    return torch.cat([(z[i : i + step] + gumbel(keys[i : i + step, None], tokens)).argmax(-1) for i in range(0, z.shape[0], step)])


def draw_kept(z: Tensor, threshold: Tensor, keys: Tensor) -> Tensor:
    """One token per row among those with z >= threshold [R, 1]; int64 [R]."""
    kept = z >= threshold
    # On a GPU a list of candidates would make the host wait for the device; a long list costs more than all tokens do.
    if z.is_cuda or int(kept.count_nonzero()) * _LIST_COST > z.numel():
        return draw_all(torch.where(kept, z, -torch.inf), keys)
    rows, tokens = kept.nonzero(as_tuple=True)
    scores = z[rows, tokens] + gumbel(keys[rows], tokens)
    best = torch.full_like(threshold[:, 0], -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    # The first of equals, as argmax has it; a row without a candidate (its logits are not numbers) gives its argmax.
    first = torch.full_like(keys, z.shape[1]).scatter_reduce_(0, rows[winners], tokens[winners], "amin")
    none = first == z.shape[1]
    return torch.where(none, z.argmax(-1), first) if none.any() else first
