"""The draw itself: temperature, then the argmax of logits plus noise among the candidates that a row's limits leave."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages import SamplingParams
from workers.engine.sampling.limits import Limits
from workers.engine.sampling.noise import gumbel, request_keys, signed_seed
from workers.engine.sampling.rows import SampledRows

_LIST_COST = 8  # what a listed candidate costs, in tokens of a row that is computed whole
_NOISE_ROWS = 4  # unfiltered rows whose noise is computed at once on a CPU, so that its temporaries stay in the processor's cache


class Draw:
    """Temperature, seeds and limits of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._choice = np.zeros(num_slots, np.int64)
        self._limits = Limits(num_slots, vocab_size)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._temperature[slot] = params.temperature
        self._seed[slot] = signed_seed(params.seed)
        self._choice[slot] = params.choice
        self._limits.set(slot, params)

    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """int64 [R] tokens from float32 logits [R, vocab], which it changes."""
        drawn = np.nonzero(self._temperature[rows.slots] > 0)[0]
        if drawn.size == 0:
            return logits.argmax(-1)
        slots, device = rows.slots[drawn], logits.device
        on_device = torch.from_numpy(drawn).to(device)
        z = logits if drawn.size == logits.shape[0] else logits[on_device]
        # From the largest down, so that a tiny temperature cannot overflow.
        z = z.sub_(z.amax(-1, keepdim=True)).div_(torch.from_numpy(self._temperature[slots]).to(device)[:, None])
        keys = request_keys(*torch.from_numpy(np.stack((self._seed[slots], self._choice[slots], rows.indices[drawn]))).to(device))
        if drawn.size == logits.shape[0]:
            return self._draw(z, keys, slots)
        tokens = logits.argmax(-1)
        tokens[on_device] = self._draw(z, keys, slots)
        return tokens

    def _draw(self, z: Tensor, keys: Tensor, slots: NDArray[np.int32]) -> Tensor:
        limited = self._limits.limited(slots)
        if not limited.any():
            return draw_all(z, keys)
        if limited.all():
            return draw_kept(z, self._limits.thresholds(z, slots), keys)
        tokens = torch.empty_like(keys)
        for chosen, some in ((limited, True), (~limited, False)):
            rows = torch.from_numpy(np.nonzero(chosen)[0]).to(z.device)
            part = z[rows]
            tokens[rows] = draw_kept(part, self._limits.thresholds(part, slots[chosen]), keys[rows]) if some else draw_all(part, keys[rows])
        return tokens


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
