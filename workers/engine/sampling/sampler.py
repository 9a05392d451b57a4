"""Whole-batch sampling: a step's logits become one token per row, and log probabilities for the
rows that ask.

The stages: bias, allowed tokens, stop tokens before their time and bad words, penalties,
temperature, min_p, top-k, top-p, and the argmax of logits plus noise, which is a draw from what is
left. A greedy row takes the argmax after the penalties. Parameters live in tables by slot, and a
stage that no row of the step uses costs nothing: all greedy is one argmax.

What comes after the penalties is either plain torch's (`draw`) or, where kernels run, theirs
(`fused`), which takes the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.draw import Draw
from workers.engine.sampling.logit_masks import logit_stages
from workers.engine.sampling.logprobs import AskedLogprobs, Logprobs
from workers.engine.sampling.penalties import Penalties
from workers.engine.sampling.rows import SampledRows

if TYPE_CHECKING:
    from workers.engine.sampling.fused import FusedDraw

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Sampled:
    """What came of a step's R rows."""

    tokens: Tensor  # int64 [R]
    asking: NDArray[np.int64]  # rows that `logprobs` is about
    logprobs: Logprobs | None


class Sampler:
    """Every stage's parameters for `num_slots` slots, and the way through the stages."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        device: torch.device = _CPU,
        fused: bool = False,
    ) -> None:
        self._logprobs = AskedLogprobs(num_slots)
        self._stages = (*logit_stages(num_slots, vocab_size, eos_token_ids), Penalties(num_slots))
        self._staged = np.zeros(num_slots, np.bool_)  # slots that use more than the draw
        self._fused = _fused_draw(num_slots, vocab_size, device) if fused else None
        self._draw = self._fused or Draw(num_slots, vocab_size)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters."""
        for part in (self._logprobs, *self._stages, self._draw):
            part.set(slot, params)
        self._staged[slot] = params.logprobs >= 0 or any(stage.uses(params) for stage in self._stages)

    def upload(self) -> None:
        """To be called once a step, behind the last `set` and before anything is sampled."""
        if self._fused is not None:
            self._fused.upload()

    def fits_graph(self, slots: NDArray[np.int32]) -> bool:
        """Return whether `draw_static` does all that these slots ask for.

        `min_tokens` rules it out to a request's end.
        """
        return self._fused is not None and not self._staged[slots].any()

    def draw_static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """int32 [R] tokens for rows that fit a graph, from logits [R, vocab] of any float dtype,
        which stay as they are.

        slots int32 [R], where `num_slots` is a row of padding; lengths int32 [R], each row's tokens
        so far; prompt_lengths int32 [num_slots]. Reads nothing from the host, so that it may be
        recorded.
        """
        assert self._fused is not None
        return self._fused.static(logits, slots, lengths, prompt_lengths)

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


def _fused_draw(num_slots: int, vocab_size: int, device: torch.device) -> FusedDraw:
    from workers.engine.sampling.fused import FusedDraw

    return FusedDraw(num_slots, vocab_size, device)
