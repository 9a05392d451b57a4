"""Which candidates a row may draw from: min_p and top-k as the smallest value that they leave, and top-p.

Candidates equal to the smallest value are kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages import SamplingParams

_ONE_TOKEN = 1e-9  # a top_p from here down keeps the largest alone, in any vocabulary

_PARTITIONED = 512  # from a top_k of this on, a CPU is faster at parting a row than at sorting its largest


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
        self._top_p[slot] = max(params.top_p, _ONE_TOKEN)

    def floors(self, z: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """The smallest value that min_p and top-k leave in each row of z [R, vocab], whose largest is 0; float32 [R, 1]."""
        floors, top_k = self._floor[slots], self._top_k[slots]
        rows = np.nonzero(top_k < self._vocab_size)[0]
        threshold = torch.from_numpy(floors).to(z.device)[:, None]
        if rows.size:
            on_device = torch.from_numpy(rows).to(z.device)
            smallest = _smallest_of_top_k(z if rows.size == len(slots) else z[on_device], top_k[rows])
            threshold[on_device] = torch.maximum(threshold[on_device], smallest)
        return threshold

    def top_p(self, slots: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._top_p[slots]


def _smallest_of_top_k(z: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    """The k-th largest value of each row of z [R, vocab]; float32 [R, 1]."""
    if not z.is_cuda and top_k.max() > _PARTITIONED:
        at = z.shape[1] - top_k
        return torch.tensor([[np.partition(row, i)[i]] for row, i in zip(z.numpy(), at.tolist(), strict=True)], dtype=z.dtype)
    largest = z.topk(int(top_k.max()), -1).values
    return largest.gather(1, torch.from_numpy(top_k).to(z.device)[:, None] - 1)


def nucleus_floors(z: Tensor, floors: Tensor, top_p: Tensor) -> Tensor:
    """Raises each row's floor to the smallest value of its nucleus: the fewest largest candidates whose probability reaches top_p.

    z [R, vocab] with no value far above 0, floors and top_p [R, 1].
    """
    ordered = z.sort(-1, descending=True).values
    weights = torch.where(ordered >= floors, ordered.exp(), 0)
    before = weights.cumsum(-1) - weights
    kept = ((before < top_p * weights.sum(-1, keepdim=True)) & (ordered >= floors)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(floors, ordered.gather(1, kept - 1))
