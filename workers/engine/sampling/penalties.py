"""Apply repetition, presence and frequency penalties, counted anew at each step from the token
table.

There is no state that preemption, a resumed request or a step launched ahead could leave behind:
the table has every token on the device. Only logits of tokens that occur are changed, so the cost
grows with the text, not with the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.rows import SampledRows

_COUNTERS = 1 << 24  # most counters of rows penalized at once: one per token of the vocabulary
_PLACES = 1 << 22  # most positions of rows penalized at once: one per token of the longest text


class Penalties:
    """Penalize tokens as vLLM does.

    A logit of a token in prompt or output is divided (above 0) or multiplied (below) by
    `repetition_penalty`. Then the frequency penalty times its count in the output, and the presence
    penalty if it occurs there, are subtracted.
    """

    def __init__(self, num_slots: int) -> None:
        self._repetition = np.ones(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._counters: Tensor | None = None  # all 0 between two calls

    def uses(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def set(self, slot: int, params: SamplingParams) -> None:
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        slots = rows.slots
        repeats = self._repetition[slots] != 1
        starts = np.where(repeats, 0, rows.prompt_lengths)  # the other two penalties count only the output
        used = repeats | (self._presence[slots] != 0) | (self._frequency[slots] != 0)
        users = np.nonzero(used & (rows.lengths > starts))[0]
        if not users.size:
            return
        # Rows of similar length together, since each is padded to the longest.
        users = users[np.argsort((rows.lengths - starts)[users], kind="stable")[::-1]]
        first = 0
        while first < users.size:
            width = int((rows.lengths - starts)[users[first]])
            last = first + max(1, min(_COUNTERS // logits.shape[1], _PLACES // width))
            self._penalize(logits, rows, users[first:last], starts, width)
            first = last

    def _penalize(
        self, logits: Tensor, rows: SampledRows, users: NDArray[np.int64], starts: NDArray[np.int64], width: int
    ) -> None:
        """Penalize the rows `users`; the longest has `width` tokens to count."""
        device, slots = logits.device, rows.slots[users]
        host = np.stack((users, slots, starts[users], rows.lengths[users], rows.prompt_lengths[users]))
        row, slot, start, length, prompt_length = to_device(host, device)[:, :, None]
        factors = np.stack((self._repetition[slots], self._presence[slots], self._frequency[slots]))
        repetition, presence, frequency = to_device(factors, device)[:, :, None]
        position = start + torch.arange(width, device=device)
        # Positions beyond a row's end repeat its first token. This is harmless: each occurrence of
        # a token writes the same logit.
        counted = (position >= prompt_length) & (position < length)
        position = torch.where(position < length, position, start)
        tokens = rows.tokens[slot, position].long()
        counts = self._count(tokens, counted.float(), logits.shape[1])
        flat, places = logits.view(-1), row * logits.shape[1] + tokens
        z = flat[places]
        z = torch.where(z > 0, z / repetition, z * repetition)
        z -= frequency * counts + presence * (counts > 0)
        flat[places] = z

    def _count(self, tokens: Tensor, weights: Tensor, vocab: int) -> Tensor:
        """Return the weighted count of each of tokens [C, width] in its row."""
        if self._counters is None or len(self._counters) < len(tokens):
            self._counters = torch.zeros(len(tokens), vocab, device=tokens.device)
        counters = self._counters[: len(tokens)]
        counters.scatter_add_(1, tokens, weights)
        try:
            return counters.gather(1, tokens)
        finally:  # also after an out-of-memory error, since the step is tried again
            counters.scatter_(1, tokens, 0.0)
