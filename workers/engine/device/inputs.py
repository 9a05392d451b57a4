"""A step's tensors: which tokens at which positions, where their keys and values go, which rows
sample. State is kept by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention import AttentionMetadata, Metadata
from workers.engine.device.staging import to_device
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan


@dataclass(slots=True)
class StepInputs:
    """T tokens of N rows, R of which sample."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    lengths: Tensor  # int64 [T], as DecoderModel.forward takes them
    metadata: Metadata
    last: Tensor  # int64 [R], the last token of each row that samples
    slots: Tensor  # int32 or int64 [R], the slots of these rows
    # Int32 or int64 [R], how many tokens their requests know, which is where the sampled one goes
    ends: Tensor


class Inputs(Protocol):
    """A table of all tokens by slot, on the device, and what else of a slot's state makes up a
    step's inputs.
    """

    tokens: Tensor  # int32 [slots, columns]: prompt, output, and what launched steps have sampled
    prompt_lengths: NDArray[np.int64]  # [slots]

    def take(self, plan: StepPlan) -> StepInputs:
        """Bring in a step's new requests and blocks, which may be done twice, and make its
        inputs.
        """
        ...

    def store(self, sampled: Tensor) -> None:
        """Put the tokens [R] that the step taken last has sampled where later steps read them."""
        ...

    def result(self, number: int) -> Tensor:
        """int32 [number], what the step taken last has sampled, all of it or nothing: to be copied
        to the host while later steps run.
        """
        ...


class HostInputs:
    """Makes a step's inputs on the host; only the tokens themselves are on the device."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.tokens = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self._block_tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self._block_size = block_size
        self._device = device
        self._where: list[Tensor] = []  # slots and columns of the tokens that the step samples
        self._sampled = torch.empty(0, dtype=torch.int32, device=device)

    def take(self, plan: StepPlan) -> StepInputs:
        for request in plan.added:
            self._add(request)
        for new in plan.new_blocks:
            self._extend(new)
        query_start = np.zeros(len(plan.counts) + 1, np.int32)
        np.cumsum(plan.counts, out=query_start[1:])
        rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
        positions = (np.arange(query_start[-1]) - query_start[rows] + plan.starts[rows]).astype(np.int64)
        slots = plan.slots[rows]
        mapping = (
            self._block_tables[slots, positions // self._block_size] * np.int64(self._block_size)
            + positions % self._block_size
        )
        lengths = np.maximum(self.prompt_lengths[slots], positions + 1)
        of_tokens = to_device(np.stack((slots.astype(np.int64), positions, lengths, mapping)), self._device)
        contexts = plan.starts + plan.counts
        longest = -(-int(contexts.max()) // self._block_size)
        metadata = AttentionMetadata(of_tokens[3], query_start, contexts, self._block_tables[:, :longest][plan.slots])
        sampling = np.stack((query_start[1:] - 1, plan.slots, contexts))[:, plan.samples].astype(np.int64)
        last, *self._where = to_device(sampling, self._device)
        input_ids = self.tokens[of_tokens[0], of_tokens[1]].long()
        return StepInputs(input_ids, of_tokens[1], of_tokens[2], metadata, last, *self._where)

    def store(self, sampled: Tensor) -> None:
        self._sampled = sampled.int()
        self.tokens[tuple(self._where)] = self._sampled

    def result(self, number: int) -> Tensor:
        return self._sampled[:number]

    def _add(self, request: AddedRequest) -> None:
        self.tokens[request.slot, : len(request.token_ids)] = to_device(
            np.array(request.token_ids, np.int32), self._device
        )
        self._block_tables[request.slot] = 0
        self.prompt_lengths[request.slot] = request.prompt_length

    def _extend(self, new: NewBlocks) -> None:
        self._block_tables[new.slot, new.first : new.first + len(new.block_ids)] = new.block_ids
