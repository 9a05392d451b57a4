"""Define the interface of a draw, for every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.grammar_mask import apply_masks
from workers.engine.sampling.rows import SampledRows


class Draw(ABC):
    """Draw a token for each row: temperature, min_p, top-k, top-p and noise.

    It stores parameters by slot.
    """

    @abstractmethod
    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters, effective from the next `upload`."""

    @abstractmethod
    def upload(self) -> None:
        """Copy the parameters to the device that reads them."""

    def apply_masks(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        """Set the logits that grammars rule out to minus infinity; see
        `grammar_mask.apply_masks`.
        """
        apply_masks(logits, rows, masks)

    @abstractmethod
    def tokens(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Return int64 [R] tokens from float32 logits [R, vocab], which may be overwritten.

        The token is NO_TOKEN if all of a row's logits are minus infinity, and NOT_FINITE if one is
        NaN or infinity.
        """

    def static(self, logits: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Return int32 [R] tokens; see `Sampler.draw_static`. For backends that record steps."""
        raise NotImplementedError
