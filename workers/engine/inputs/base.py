"""A step's input tensors: tokens, positions, cache slots of keys and values, and sampled places.

State is stored by slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention.base import Metadata
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.messages.step import NewBlocks, StepPlan


@dataclass(slots=True)
class StepInputs:
    """The tensors for T tokens of N rows and R sampled places."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    lengths: Tensor  # int64 [T], see DecoderModel.forward
    metadata: list[Metadata]  # by column of the block tables
    last: Tensor  # int64 [R], the token after which each is sampled
    slots: Tensor  # int32 or int64 [R], the slots of their rows
    # Int32 or int64 [R], tokens before each sampled token: its position
    ends: Tensor
    prompt_lengths: Tensor  # int32 or int64 [slots]; on the host for `HostInputs`


class Inputs(ABC):
    """A table of all tokens by slot, on the device, with the other state for inputs of steps.

    `stage` and `build` are the two parts of `take`, for a backend that records steps: `build` runs
    entirely on the device.
    """

    tokens: Tensor  # int32 [slots, columns]: prompt, output, and samples of launched steps
    prompt_lengths: NDArray[np.int64]  # [slots]

    @abstractmethod
    def take(self, plan: StepPlan) -> StepInputs:
        """Store a step's new requests and blocks, and return its inputs; may be repeated."""

    @abstractmethod
    def store(self, sampled: Tensor) -> None:
        """Store the tokens [R] sampled by the last step, for later steps and for `result`.

        Later steps find token 0 in the place of NO_TOKEN and NOT_FINITE.
        """

    def store_rows(self, plan: StepPlan, samples: NDArray[np.int64], sampled: Tensor) -> None:
        """Overwrite some tokens of the last step by `sampled` [R], those with the indices
        `samples`.
        """
        raise NotImplementedError

    @abstractmethod
    def result(self, number: int) -> Tensor:
        """Return the samples of the last step, int32 [number], all or none.

        They can be copied to the host while later steps run.
        """

    def stage(self, plan: StepPlan, rows: int) -> None:
        """Store a step padded to `rows` rows; its rows must have one token each."""
        raise NotImplementedError

    def build(self, num_rows: int, num_tokens: int, max_query: int, max_context: int, num_samples: int) -> StepInputs:
        """Return the inputs of the staged step; nothing else on the host is used."""
        raise NotImplementedError


def column_pages(groups: CacheGroups, new: NewBlocks) -> tuple[int, list[list[int]]]:
    """Return new blocks as they are in the block tables of their group's columns: the index of the
    first page, and the pages of each column.
    """
    group = groups.groups[new.group]
    if group.pages == 1:
        return new.first, [new.block_ids]
    parts = groups.grid // group.block_size
    pages = np.array(new.block_ids).reshape(-1, group.columns, parts)
    return new.first * parts, pages.transpose(1, 0, 2).reshape(group.columns, -1).tolist()
