"""Sample a whole step: one token per row from its logits, and log probabilities for rows that ask.

The stages: bias, allowed tokens, min_tokens and bad words, penalties, masks of grammars,
temperature, min_p, top-k, top-p, and the argmax of logits plus noise, which is a random draw. A
greedy row takes the argmax after the masks. Parameters are stored in tables by slot, except the
masks, which come with each step. A stage that no row uses costs nothing: an all-greedy step is one
argmax.

The stages after the masks are a `Draw` of the backend: in plain torch or by kernels, with the same
tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import TokenMasks
from workers.engine.sampling.base import Draw
from workers.engine.sampling.logit_masks import logit_stages
from workers.engine.sampling.logprobs import AskedLogprobs, Logprobs
from workers.engine.sampling.penalties import Penalties
from workers.engine.sampling.rows import SampledRows


@dataclass(slots=True)
class Sampled:
    """The result of a step's R rows."""

    tokens: Tensor  # int64 [R], may be NO_TOKEN or NOT_FINITE
    asking: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # rows with `logprobs`
    logprobs: Logprobs | None = None


class Sampler:
    """Hold every stage's parameters for `num_slots` slots, and run the stages."""

    def __init__(self, num_slots: int, vocab_size: int, draw: Draw, eos_token_ids: Collection[int] = ()) -> None:
        self._logprobs = AskedLogprobs(num_slots)
        self._stages = (*logit_stages(num_slots, vocab_size, eos_token_ids), Penalties(num_slots))
        self._staged = np.zeros(num_slots, np.bool_)  # slots that need more than the draw
        self._draw = draw

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters."""
        for stage in self._stages:
            stage.set(slot, params)
        self._logprobs.set(slot, params)
        self._draw.set(slot, params)
        self._staged[slot] = params.logprobs >= 0 or any(stage.uses(params) for stage in self._stages)

    def upload(self) -> None:
        """Upload the parameters; call once a step, after the last `set` and before sampling."""
        self._draw.upload()

    def needs_stages(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which of these slots have parameters that `draw_static` does not support, [R].

        A request with `min_tokens` has until its end.
        """
        return self._staged[slots]

    def draw_static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Return int32 [R] tokens, as from `Draw.tokens`, from logits [R, vocab] of any float
        dtype, which stay unchanged. Parameters beyond the draw's have no effect.

        slots int32 [R], in which `num_slots` is a padding row; lengths int32 [R], each row's tokens
        so far; prompt_lengths int32 [num_slots]. Reads nothing from the host, so it may be
        recorded.
        """
        return self._draw.static(logits, slots, lengths, prompt_lengths)

    def sample(self, logits: Tensor, rows: SampledRows, masks: TokenMasks | None = None) -> Sampled:
        """Draw from contiguous float32 logits [R, vocab], which are overwritten."""
        if not self._staged[rows.slots].any():
            return Sampled(self._masked_draw(logits, rows, masks))
        kept = self._logprobs.keep(logits, rows)
        for stage in self._stages:
            stage.apply(logits, rows)
        tokens = self._masked_draw(logits, rows, masks)
        if kept is None:
            return Sampled(tokens)
        return Sampled(tokens, kept.rows, kept.logprobs(tokens))

    def _masked_draw(self, logits: Tensor, rows: SampledRows, masks: TokenMasks | None) -> Tensor:
        if masks is not None and masks.rows.size:
            self._draw.apply_masks(logits, masks.rows, masks.masks)
        return self._draw.tokens(logits, rows)
