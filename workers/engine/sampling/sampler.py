"""Whole-batch sampling: a step's logits become one token per row, and log probabilities for the
rows that ask.

The stages: bias, allowed tokens, stop tokens before their time and bad words, penalties,
temperature, min_p, top-k, top-p, and the argmax of logits plus noise, which is a draw from what is
left. A greedy row takes the argmax after the penalties. Parameters live in tables by slot, and a
stage that no row of the step uses costs nothing: all greedy is one argmax.

What comes after the penalties is a `Draw` of the backend's: plain torch's or, where kernels run,
theirs, which takes the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.base import Draw
from workers.engine.sampling.logit_masks import logit_stages
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

    def __init__(self, num_slots: int, vocab_size: int, draw: Draw, eos_token_ids: Collection[int] = ()) -> None:
        self._logprobs = AskedLogprobs(num_slots)
        self._stages = (*logit_stages(num_slots, vocab_size, eos_token_ids), Penalties(num_slots))
        self._staged = np.zeros(num_slots, np.bool_)  # slots that use more than the draw
        self._draw = draw

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters."""
        for stage in self._stages:
            stage.set(slot, params)
        self._logprobs.set(slot, params)
        self._draw.set(slot, params)
        self._staged[slot] = params.logprobs >= 0 or any(stage.uses(params) for stage in self._stages)

    def upload(self) -> None:
        """To be called once a step, behind the last `set` and before anything is sampled."""
        self._draw.upload()

    def fits_graph(self, slots: NDArray[np.int32]) -> bool:
        """Return whether `draw_static` does all that these slots ask for.

        `min_tokens` rules it out to a request's end.
        """
        return not self._staged[slots].any()

    def draw_static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """int32 [R] tokens for rows that fit a graph, from logits [R, vocab] of any float dtype,
        which stay as they are.

        slots int32 [R], where `num_slots` is a row of padding; lengths int32 [R], each row's tokens
        so far; prompt_lengths int32 [num_slots]. Reads nothing from the host, so that it may be
        recorded.
        """
        return self._draw.static(logits, slots, lengths, prompt_lengths)

    def sample(self, logits: Tensor, rows: SampledRows) -> Sampled:
        """Draw from contiguous float32 logits [R, vocab], which it changes."""
        if not self._staged[rows.slots].any():
            return Sampled(self._draw.tokens(logits, rows), np.empty(0, np.int64), None)
        kept = self._logprobs.keep(logits, rows)
        for stage in self._stages:
            stage.apply(logits, rows)
        tokens = self._draw.tokens(logits, rows)
        if kept is None:
            return Sampled(tokens, np.empty(0, np.int64), None)
        return Sampled(tokens, kept.rows, kept.logprobs(tokens))
