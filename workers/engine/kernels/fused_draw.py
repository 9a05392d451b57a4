"""The draw by kernels that read each slot's parameters from a table on the device.

Only changed parameters are sent.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.kernels import sampling as kernels
from workers.engine.kernels.grammar_mask import mask_rows
from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.base import Draw
from workers.engine.sampling.grammar_mask import check_masks
from workers.engine.sampling.limits import settled
from workers.engine.sampling.noise import signed_seed
from workers.engine.sampling.rows import SampledRows


class FusedDraw(Draw):
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words = np.zeros((num_slots, kernels.WORDS), np.int32)
        self._floats, self._longs = self._words.view(np.float32), self._words.view(np.int64)
        self._changed: set[int] = set()
        # All rows start greedy; the row after the slots, for padding, stays greedy.
        self._table = torch.zeros((num_slots + 1, kernels.WORDS), dtype=torch.int32, device=device)

    def set(self, slot: int, params: SamplingParams) -> None:
        floor, top_k, top_p = settled(params, self._vocab_size)
        self._floats[slot, [kernels.TEMPERATURE, kernels.FLOOR, kernels.TOP_P]] = params.temperature, -floor, top_p
        self._words[slot, kernels.TOP_K] = top_k
        self._longs[slot, [kernels.SEED // 2, kernels.CHOICE // 2]] = signed_seed(params.seed), params.choice
        self._changed.add(slot)

    def upload(self) -> None:
        """Send the changed slots' parameters in one copy; then the stream updates the table."""
        if not self._changed:
            return
        slots = np.array(sorted(self._changed), np.int32)
        rows = to_device(np.concatenate((slots[:, None], self._words[slots]), 1), self._table.device)
        self._table.index_copy_(0, rows[:, 0].long(), rows[:, 1:])
        self._changed.clear()  # only now: for want of memory the step may be launched again

    def apply_masks(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        check_masks(logits, rows, masks)
        mask_rows(logits, to_device(rows, logits.device), to_device(masks, logits.device))

    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        where = to_device(np.stack((rows.slots, rows.indices)).astype(np.int32), logits.device)
        return kernels.draw(logits, self._table, where[0], where[1], None).long()

    def static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        return kernels.draw(logits, self._table, slots, lengths, prompt_lengths)
