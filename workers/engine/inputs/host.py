"""A step's inputs, built on the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention.base import AttentionMetadata, Metadata
from workers.engine.cuda.staging import to_device
from workers.engine.inputs.base import Inputs, StepInputs, column_pages
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan


class HostInputs(Inputs):
    """Inputs built on the host; only the token table is on the device."""

    def __init__(self, num_slots: int, max_model_len: int, groups: CacheGroups, device: torch.device) -> None:
        self.tokens = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self._prompt_lengths = torch.from_numpy(self.prompt_lengths)
        self._groups = groups
        blocks = -(-max_model_len // groups.grid)
        # [slots, pages of all blocks] of each column, by group
        self._tables = [
            [np.zeros((num_slots, blocks * (groups.grid // group.block_size)), np.int32) for _ in range(group.columns)]
            for group in groups.groups
        ]
        self._columns = [
            (table, group.block_size)
            for group, tables in zip(groups.groups, self._tables, strict=True)
            for table in tables
        ]
        self._device = device
        self._where: tuple[Tensor, ...] = ()  # slots and columns of the tokens sampled by the step
        self._sampled = torch.empty(0, dtype=torch.int32, device=device)

    def take(self, plan: StepPlan) -> StepInputs:
        for request in plan.added:
            self._add(request)
        for new in plan.new_blocks:
            self._extend(new)
        query_start = np.zeros(len(plan.counts) + 1, np.int32)
        np.cumsum(plan.counts, out=query_start[1:])
        rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
        positions = np.arange(len(rows)) + (plan.starts - query_start[:-1])[rows]
        slots = plan.slots[rows]
        lengths = np.maximum(self.prompt_lengths[slots], positions + 1)
        mappings = [_slot_mapping(table, size, slots, positions) for table, size in self._columns]
        of_tokens = to_device(np.array((slots, positions, lengths, *mappings), np.int64), self._device).unbind()
        contexts = plan.starts + plan.counts
        longest = int(contexts.max())
        metadata: list[Metadata] = [
            AttentionMetadata(mapping, query_start, contexts, table[:, : -(-longest // size)][plan.slots])
            for mapping, (table, size) in zip(of_tokens[3:], self._columns, strict=True)
        ]
        sampled, later = plan.sampled()
        of_samples = np.array((query_start[1:] - 1, plan.slots, contexts), np.int64)[:, sampled]
        of_samples[::2] -= later
        last, where, ends = to_device(of_samples, self._device).unbind()
        self._where = where, ends
        input_ids = self.tokens[of_tokens[:2]].long()
        return StepInputs(input_ids, of_tokens[1], of_tokens[2], metadata, last, where, ends, self._prompt_lengths)

    def store(self, sampled: Tensor) -> None:
        self._sampled = sampled.int()
        self.tokens[self._where] = self._sampled.clamp(min=0)

    def result(self, number: int) -> Tensor:
        return self._sampled[:number]

    def _add(self, request: AddedRequest) -> None:
        self.tokens[request.slot, : len(request.token_ids)] = to_device(
            np.array(request.token_ids, np.int32), self._device
        )
        for table, _ in self._columns:
            table[request.slot] = 0
        self.prompt_lengths[request.slot] = request.prompt_length

    def _extend(self, new: NewBlocks) -> None:
        first, of_columns = column_pages(self._groups, new)
        for table, pages in zip(self._tables[new.group], of_columns, strict=True):
            table[new.slot, first : first + len(pages)] = pages


def _slot_mapping(
    table: NDArray[np.int32], block_size: int, slots: NDArray[np.int32], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    blocks, offsets = np.divmod(positions, block_size)
    return table[slots, blocks] * np.int64(block_size) + offsets
