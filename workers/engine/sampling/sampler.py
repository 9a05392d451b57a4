"""Whole-batch sampling: a step's logits become one token per row, and log probabilities for the rows that ask.

The stages, in vLLM's order: bias, stop tokens before their time and bad words, penalties, temperature, min_p, top-k, top-p, and the argmax
of logits plus noise, which is a draw from what is left. A greedy row takes the argmax after the penalties. Parameters live in tables by
slot, and a stage that no row of the step uses costs nothing: all greedy is one argmax.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages import SamplingParams
from workers.engine.sampling.draw import Draw
from workers.engine.sampling.logit_masks import BadWords, LogitBias, MinTokens
from workers.engine.sampling.logprobs import AskedLogprobs, Logprobs
from workers.engine.sampling.penalties import Penalties
from workers.engine.sampling.rows import SampledRows


@dataclass(slots=True)
class Sampled:
    """What came of a step's R rows."""

    tokens: Tensor  # int64 [R]
    asking: NDArray[np.int64]  # rows that `logprobs` is about
    logprobs: Logprobs | None


class Sampler:
    """Every stage's parameters for `num_slots` slots, and the way through the stages."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._logprobs = AskedLogprobs(num_slots)
        self._changes = (LogitBias(), MinTokens(num_slots, vocab_size, eos_token_ids), BadWords(), Penalties(num_slots))
        self._draw = Draw(num_slots, vocab_size)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrites a slot's parameters."""
        for stage in (self._logprobs, *self._changes, self._draw):
            stage.set(slot, params)

    def sample(self, logits: Tensor, rows: SampledRows) -> Sampled:
        """Draws from contiguous float32 logits [R, vocab], which it changes."""
        kept = self._logprobs.keep(logits, rows)
        for stage in self._changes:
            stage.apply(logits, rows)
        tokens = self._draw.tokens(logits, rows)
        if kept is None:
            return Sampled(tokens, np.empty(0, np.int64), None)
        return Sampled(tokens, kept.rows, kept.logprobs(tokens))
