"""What a draw is, whatever it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from workers.engine.messages.core import SamplingParams
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

    @abstractmethod
    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """int64 [R] tokens from float32 logits [R, vocab], which it may change."""

    def static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """int32 [R] tokens; see `Sampler.draw_static`. Of a backend that records steps."""
        raise NotImplementedError
