"""What a draw is, whatever it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.grammar_mask import apply_masks
from workers.engine.sampling.rows import SampledRows


class Draw(ABC):
    """Draws a token for each row: temperature, min_p, top-k, top-p and noise. It keeps parameters
    by slot.
    """

    @abstractmethod
    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters, which count from the next `upload` on."""

    @abstractmethod
    def upload(self) -> None:
        """Send what was set to where it is read."""

    def apply_masks(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        """Set what grammars rule out to minus infinity; see `grammar_mask.apply_masks`."""
        apply_masks(logits, rows, masks)

    @abstractmethod
    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """int64 [R] tokens from float32 logits [R, vocab], which it may change."""

    def static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """int32 [R] tokens; see `Sampler.draw_static`. Of a backend that records steps."""
        raise NotImplementedError
