"""What the stages of sampling work on: the rows of a step that sample, and what requests asked for,
kept by slot.
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
    """R rows, each of a request in a slot of its own.

    The host knows how many tokens there are; the newest may be on the device alone.
    """

    slots: NDArray[np.int32]  # [R]
    prompt_lengths: NDArray[np.int64]  # [R]
    # [R] prompt and output so far, which is the position of the token to draw
    lengths: NDArray[np.int64]
    # Int32 [slots, columns], on the device: values beyond a row's length are undefined
    tokens: Tensor

    @property
    def indices(self) -> NDArray[np.int64]:
        """The output index of the token that each row is about to draw; [R]."""
        return self.lengths - self.prompt_lengths


class LogitsStage(Protocol):
    """A feature of sampling that changes logits before a token is drawn; it keeps its parameters by
    slot.
    """

    def uses(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters needs the stage."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite a slot's parameters."""

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Change float32 logits [R, vocab] in place, those of rows that use the stage."""


class Lists:
    """For some slots a few parallel arrays of one length."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[NDArray[np.int64] | NDArray[np.float32], ...]] = {}

    def put(self, slot: int, *arrays: NDArray[np.int64] | NDArray[np.float32]) -> None:
        """Overwrites a slot's arrays; empty ones, and none, take it out."""
        if arrays and arrays[0].size:
            self._arrays[slot] = arrays
        else:
            self._arrays.pop(slot, None)

    def users(self, slots: NDArray[np.int32]) -> list[int]:
        """Return the rows whose slots have arrays."""
        return [row for row, slot in enumerate(slots.tolist()) if slot in self._arrays] if self._arrays else []

    def gather(self, slots: NDArray[np.int32], rows: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
        """Return the arrays of `rows`, all of which use them, one behind the other; the first array
        of the result says each item's row.
        """
        found = [self._arrays[slot] for slot in slots[rows].tolist()]
        lengths = [len(arrays[0]) for arrays in found]
        return np.repeat(np.asarray(rows, np.int64), lengths), *(
            np.concatenate(parts) for parts in zip(*found, strict=True)
        )
