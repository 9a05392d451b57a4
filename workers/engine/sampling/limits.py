"""Limit the candidates of a row: min_p and top-k as the smallest allowed value, and top-p.

Candidates equal to the smallest value are kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams

SMALLEST = np.finfo(np.float32).min
"""The smallest value of a token that is not ruled out."""

_ONE_TOKEN = 1e-9  # a smaller top_p keeps only the largest, in any vocabulary

AT_ONCE = 1 << 24  # most logits in rows whose k-th largest a device finds together
_SORTED = 1024  # for a larger top_k a device sorts the whole row
_STRIDE = 25  # one value in this many is sampled to estimate the position of the k-th largest
_SPREAD = 4.0  # standard deviations that the estimate may be off


def settled(params: SamplingParams, vocab_size: int) -> tuple[float, int, float]:
    """Return the log of min_p, top_k (`vocab_size` for no limit) and top_p."""
    floor = math.log(params.min_p) if params.min_p else -math.inf
    return floor, min(params.top_k or vocab_size, vocab_size), max(params.top_p, _ONE_TOKEN)


class SamplingLimits:
    """The three limits of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # min_p, as a distance from the largest logit
        self._floor = np.full(num_slots, -np.inf, np.float32)
        self._top_k = np.full(num_slots, vocab_size, np.int64)
        self._top_p = np.ones(num_slots, np.float32)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._floor[slot], self._top_k[slot], self._top_p[slot] = settled(params, self._vocab_size)

    def floors(self, z: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """Return the smallest value that min_p and top-k allow in each row of z [R, vocab], whose
        largest value is 0; float32 [R, 1].
        """
        floors, top_k = self._floor[slots], self._top_k[slots]
        rows = np.nonzero(top_k < self._vocab_size)[0]
        threshold = to_device(floors, z.device)[:, None]
        if rows.size:
            on_device = to_device(rows, z.device)
            find = smallest_on_device if z.is_cuda else smallest_on_host
            threshold[on_device] = torch.maximum(threshold[on_device], find(z, rows, top_k[rows]))
        return threshold

    def top_p(self, slots: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._top_p[slots]


def smallest_on_device(z: Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int64]) -> Tensor:
    """Return the k-th largest value of each of some rows [A] of z [R, vocab]; float32 [A, 1].

    A large k of one row does not slow down the others.
    """
    smallest = z.new_empty(len(rows), 1)
    order = np.argsort(top_k, kind="stable")
    few = int(np.count_nonzero(top_k <= _SORTED))
    step = max(1, AT_ONCE // z.shape[1])
    for group in (order[:few], order[few:]):
        for part in (group[first : first + step] for first in range(0, len(group), step)):
            which, its_rows, places = to_device(np.stack((part, rows[part], top_k[part] - 1)), z.device)
            smallest[which] = z[its_rows].topk(int(top_k[part].max()), -1).values.gather(1, places[:, None])
    return smallest


def smallest_on_host(z: Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int64]) -> Tensor:
    """Return the same on a CPU, row by row."""
    values = z.numpy()
    return torch.tensor(
        [[_kth_largest(values[row], k)] for row, k in zip(rows.tolist(), top_k.tolist(), strict=True)], dtype=z.dtype
    )


def _kth_largest(values: NDArray[np.float32], k: int) -> float:
    """Return the k-th largest value of a row.

    Only values near the k-th largest of a sample are partitioned, or all if that estimate was
    wrong. Values that are ruled out are skipped, since many equal values are slow to partition.
    """
    sample = np.sort(values[::_STRIDE])
    share = k / len(values)
    place, width = len(sample) * (1 - share), _SPREAD * math.sqrt(len(sample) * share * (1 - share)) + 3
    low, high = int(place - width), int(place + width)
    lowest = max(sample[low], SMALLEST) if low >= 0 else SMALLEST
    highest = sample[high] if high < len(sample) else np.inf
    inside = values[(values >= lowest) & (values <= highest)]
    left = k - int(np.count_nonzero(values > highest))
    if not 0 < left <= len(inside):
        inside, left = values[values >= SMALLEST], k
    at = len(inside) - left
    if at < 0:
        return -math.inf
    return float(np.partition(inside, at)[at])


def nucleus_floors(z: Tensor, floors: Tensor, top_p: Tensor) -> Tensor:
    """Raise each row's floor to the smallest value of its nucleus: the fewest largest candidates
    whose probability reaches top_p.

    z [R, vocab] has no value far above 0; floors and top_p are [R, 1].
    """
    ordered = z.sort(-1, descending=True).values
    weights = torch.where(ordered >= floors, ordered.exp(), 0)
    before = weights.cumsum(-1) - weights
    kept = ((before < top_p * weights.sum(-1, keepdim=True)) & (ordered >= floors)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(floors, ordered.gather(1, kept - 1))
