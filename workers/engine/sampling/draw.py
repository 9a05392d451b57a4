"""Draw tokens: temperature, then the argmax of logits plus noise among the candidates within a
row's limits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import NO_TOKEN, NOT_FINITE
from workers.engine.sampling.base import Draw
from workers.engine.sampling.draw_cpu import draw_rows
from workers.engine.sampling.limits import SamplingLimits, nucleus_floors
from workers.engine.sampling.noise import gumbel, request_keys, signed_seed
from workers.engine.sampling.rows import SampledRows

_AT_ONCE = 1 << 24  # most logits drawn together on a device


class TorchDraw(Draw):
    """Temperature, seeds and limits of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._choice = np.zeros(num_slots, np.int64)
        self._limits = SamplingLimits(num_slots, vocab_size)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._temperature[slot] = params.temperature
        self._seed[slot] = signed_seed(params.seed)
        self._choice[slot] = params.choice
        self._limits.set(slot, params)

    def upload(self) -> None:
        pass

    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        drawn = np.nonzero(self._temperature[rows.slots] > 0)[0]
        if drawn.size == 0:
            return _likeliest(logits)
        slots, device = rows.slots[drawn], logits.device
        on_device = to_device(drawn, device)
        z = logits if drawn.size == logits.shape[0] else logits[on_device]
        # Relative to the largest logit, so that a tiny temperature cannot overflow.
        largest = z.amax(-1, keepdim=True)
        z = z.sub_(largest).div_(to_device(self._temperature[slots], device)[:, None])
        keys = request_keys(*to_device(np.stack((self._seed[slots], self._choice[slots], rows.indices[drawn])), device))
        chosen = _checked(self._draw(z, keys, slots), largest[:, 0])
        if drawn.size == logits.shape[0]:
            return chosen
        tokens = _likeliest(logits)
        tokens[on_device] = chosen
        return tokens

    def _draw(self, z: Tensor, keys: Tensor, slots: NDArray[np.int32]) -> Tensor:
        floors, top_p = self._limits.floors(z, slots), self._limits.top_p(slots)
        if not z.is_cuda:
            host_keys = keys.numpy().view(np.uint64)
            return torch.from_numpy(
                draw_rows(z.numpy(), floors[:, 0].numpy(), top_p, host_keys, torch.get_num_threads())
            )
        return draw_on_device(z, floors, to_device(top_p, z.device)[:, None] if (top_p < 1).any() else None, keys)


def draw_on_device(z: Tensor, floors: Tensor, top_p: Tensor | None, keys: Tensor) -> Tensor:
    """Draw one token per row of z [R, vocab], at least `floors` [R, 1] and in the nucleus of
    `top_p` [R, 1], if given; int64 [R].

    There is no branch on device values, for which the host would have to wait.
    """
    tokens = torch.arange(z.shape[1], device=z.device)
    drawn = []
    step = max(1, _AT_ONCE // z.shape[1])
    for part in (slice(first, first + step) for first in range(0, len(z), step)):
        lowest = floors[part] if top_p is None else nucleus_floors(z[part], floors[part], top_p[part])
        drawn.append(torch.where(z[part] >= lowest, z[part] + gumbel(keys[part, None], tokens), -torch.inf).argmax(-1))
    return torch.cat(drawn)


def _likeliest(logits: Tensor) -> Tensor:
    """Return the argmax of each row; numpy's is ten times as fast as torch's on a CPU."""
    if logits.is_cuda:
        largest, tokens = logits.max(-1)
        return _checked(tokens, largest)
    values = logits.numpy()
    found = values.argmax(-1)
    return _checked(torch.from_numpy(found), torch.from_numpy(values[np.arange(len(found)), found]))


def _checked(tokens: Tensor, largest: Tensor) -> Tensor:
    """Return the tokens of rows with these largest logits, of which NaN is the largest, all [R].

    A row whose largest logit is not finite gets NO_TOKEN or NOT_FINITE.
    """
    if not largest.is_cuda and np.isfinite(largest.numpy()).all():
        return tokens
    return torch.where(largest.isfinite(), tokens, torch.where(largest == -torch.inf, NO_TOKEN, NOT_FINITE))
