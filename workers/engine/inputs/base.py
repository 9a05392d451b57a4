"""A step's tensors: which tokens at which positions, where their keys and values go, which of them
are sampled after. State is kept by slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention.base import Metadata
from workers.engine.messages.step import StepPlan


@dataclass(slots=True)
class StepInputs:
    """T tokens of N rows, and R places where a token is sampled."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    lengths: Tensor  # int64 [T], as DecoderModel.forward takes them
    metadata: Metadata
    last: Tensor  # int64 [R], the token after which each is sampled
    slots: Tensor  # int32 or int64 [R], the slots of their rows
    # Int32 or int64 [R], how many tokens come before each, which is where the sampled one goes
    ends: Tensor
    prompt_lengths: Tensor  # int32 or int64 [slots]; on the host where inputs are made there


class Inputs(ABC):
    """A table of all tokens by slot, on the device, and what else of a slot's state makes up a
    step's inputs.

    `stage` and `build` are `take` in two parts, for a backend that records steps: what is built is
    made on the device alone.
    """

    tokens: Tensor  # int32 [slots, columns]: prompt, output, and what launched steps have sampled
    prompt_lengths: NDArray[np.int64]  # [slots]

    @abstractmethod
    def take(self, plan: StepPlan) -> StepInputs:
        """Bring in a step's new requests and blocks, which may be done twice, and make its
        inputs.
        """

    @abstractmethod
    def store(self, sampled: Tensor) -> None:
        """Put the tokens [R] that the step taken last has sampled where later steps read them."""

    @abstractmethod
    def result(self, number: int) -> Tensor:
        """int32 [number], what the step taken last has sampled, all of it or nothing: to be copied
        to the host while later steps run.
        """

    def stage(self, plan: StepPlan, rows: int) -> None:
        """Bring in a step that is padded to `rows` rows; the padding needs rows of one token."""
        raise NotImplementedError

    def build(self, num_rows: int, num_tokens: int, max_query: int, max_context: int, num_samples: int) -> StepInputs:
        """Return the inputs of the step that was staged last; it depends on nothing else on the
        host.
        """
        raise NotImplementedError
