"""Whole-batch sampling: a step's logits become one token per row, and log probabilities for the
rows that ask.

The stages: bias, allowed tokens, stop tokens before their time and bad words, penalties, masks of
grammars, temperature, min_p, top-k, top-p, and the argmax of logits plus noise, which is a draw
from what is left. A greedy row takes the argmax after the masks. Parameters live in tables by slot,
but for the masks, which come with each step; a stage that no row of the step uses costs nothing:
all greedy is one argmax.

What comes after the masks is a `Draw` of the backend's: plain torch's or, where kernels run,
theirs, which takes the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import TokenMasks
from workers.engine.sampling.base import Draw
from workers.engine.sampling.logit_masks import logit_stages
from workers.engine.sampling.logprobs import AskedLogprobs, Logprobs
from workers.engine.sampling.penalties import Penalties
from workers.engine.sampling.rows import SampledRows


@dataclass(slots=True)
class Sampled:
    """What came of a step's R rows."""

    tokens: Tensor  # int64 [R]
    without: Tensor | None  # bool [R], masked rows that had no token to draw; None for no row
    asking: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # `logprobs` is about these rows
    logprobs: Logprobs | None = None


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

    def sample(self, logits: Tensor, rows: SampledRows, masks: TokenMasks | None = None) -> Sampled:
        """Draw from contiguous float32 logits [R, vocab], which it changes."""
        if not self._staged[rows.slots].any():
            return Sampled(*self._masked_draw(logits, rows, masks))
        kept = self._logprobs.keep(logits, rows)
        for stage in self._stages:
            stage.apply(logits, rows)
        tokens, without = self._masked_draw(logits, rows, masks)
        if kept is None:
            return Sampled(tokens, without)
        return Sampled(tokens, without, kept.rows, kept.logprobs(tokens))

    def _masked_draw(self, logits: Tensor, rows: SampledRows, masks: TokenMasks | None) -> tuple[Tensor, Tensor | None]:
        """Return the rows' tokens, and which masked rows had none to draw."""
        if masks is None or not masks.rows.size:
            return self._draw.tokens(logits, rows), None
        self._draw.apply_masks(logits, masks.rows, masks.masks)
        tokens = self._draw.tokens(logits, rows)
        # Whatever a draw makes of the logits, that of its token is a number, unless none was left.
        without = ~logits.gather(1, tokens[:, None])[:, 0].isfinite()
        masked = np.zeros(len(tokens), np.bool_)
        masked[masks.rows] = True
        return tokens, without & to_device(masked, logits.device)
