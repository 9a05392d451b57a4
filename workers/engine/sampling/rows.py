"""Define the inputs of the sampling stages: a step's sampling rows, and request parameters by
slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.messages.core import SamplingParams


@dataclass(slots=True)
class SampledRows:
    """R rows, each of a request in its own slot.

    The host has the number of tokens; the newest tokens may be on the device only.
    """

    slots: NDArray[np.int32]  # [R]
    prompt_lengths: NDArray[np.int64]  # [R]
    # [R], length of prompt and output so far, the position of the token to draw
    lengths: NDArray[np.int64]
    # Int32 [slots, columns], on the device: values beyond a row's length are undefined
    tokens: Tensor

    @property
    def indices(self) -> NDArray[np.int64]:
        """Return the output index of the token that each row draws next; [R]."""
        return self.lengths - self.prompt_lengths


class LogitsStage(Protocol):
    """A sampling feature that changes logits before the draw; it stores its parameters by slot."""

    def uses(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters needs the stage."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters."""

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Change float32 logits [R, vocab] in place, for the rows that use the stage."""


class Lists:
    """Parallel arrays of equal length for some slots."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[NDArray[np.int64] | NDArray[np.float32], ...]] = {}

    def put(self, slot: int, *arrays: NDArray[np.int64] | NDArray[np.float32]) -> None:
        """Overwrite a slot's arrays; empty or no arrays remove it."""
        if arrays and arrays[0].size:
            self._arrays[slot] = arrays
        else:
            self._arrays.pop(slot, None)

    def users(self, slots: NDArray[np.int32]) -> list[int]:
        """Return the rows whose slots have arrays."""
        return [row for row, slot in enumerate(slots.tolist()) if slot in self._arrays] if self._arrays else []

    def gather(self, slots: NDArray[np.int32], rows: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
        """Return the arrays of `rows`, all with arrays, concatenated; the first array of the result
        is each item's row.
        """
        found = [self._arrays[slot] for slot in slots[rows].tolist()]
        lengths = [len(arrays[0]) for arrays in found]
        return np.repeat(np.asarray(rows, np.int64), lengths), *(
            np.concatenate(parts) for parts in zip(*found, strict=True)
        )
