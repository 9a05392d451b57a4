"""Build a step's inputs on the device: the host sends the changes in one copy, and kernels do the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention.base import DeviceMetadata, Metadata
from workers.engine.cuda.staging import RESULTS, StagingRing, to_device
from workers.engine.inputs.base import Inputs, StepInputs, column_pages
from workers.engine.kernels import inputs as kernels
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.messages.step import StepPlan

_BUFFER_WORDS = 1 << 18
_MOST_VALUES = 1 << 16  # most values of one write, so that several fit into a buffer

Write = tuple[int, int, int, Sequence[int]]
"""Table, row, first column, values."""


class DeviceInputs(Inputs):
    """Tokens, prompt lengths and block tables by slot, on the device; kernels build inputs from
    them.

    `stage` sends the host's part of a step. `build` runs entirely on the device and may be recorded
    in a CUDA graph with the rest of the step. Data that exceed a buffer, such as the tokens of many
    long prompts at once, are sent earlier in separate buffers.
    """

    def __init__(self, num_slots: int, max_model_len: int, groups: CacheGroups, device: torch.device) -> None:
        self._groups = groups
        self._block_sizes = tuple(group.block_size for group in groups.columns)
        pages = -(-max_model_len // groups.grid) * (groups.grid // min(self._block_sizes))
        if len(self._block_sizes) > 1:
            pages = kernels.aligned(pages)
        self.tokens = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self.device_prompt_lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # [columns of all groups, slots, pages]
        self.block_tables = torch.zeros((len(self._block_sizes), num_slots, pages), dtype=torch.int32, device=device)
        self._tables = self.block_tables.unbind()
        self._max_model_len = max_model_len
        self._rows = -(-num_slots // kernels.FIRST) * kernels.FIRST
        self._runs_at = kernels.runs_at(self._rows)
        self._ring = StagingRing(self._runs_at + _BUFFER_WORDS, device)
        self._results = torch.zeros((RESULTS, self._rows), dtype=torch.int32, device=device)
        self._result = 0
        self._counting = np.arange(self._rows + 1, dtype=np.int32)

    def take(self, plan: StepPlan) -> StepInputs:
        self.stage(plan, len(plan.slots))
        tokens, longest = int(plan.counts.sum()), int(plan.counts.max())
        return self.build(
            len(plan.slots), tokens, longest, int((plan.starts + plan.counts).max()), int(plan.samples.sum())
        )

    def stage(self, plan: StepPlan, rows: int) -> None:
        """Send the kernels' data of a step."""
        for request in plan.added:
            self.prompt_lengths[request.slot] = request.prompt_length
        pieces = list(self._pieces(plan))
        for piece in pieces[:-1]:
            buffer = self._ring.next()
            self._send(buffer, 0, 0, piece)
            self._apply()
        buffer = self._ring.next()
        samples = self._fill(buffer, plan, rows)
        self._send(buffer, len(plan.slots), samples, pieces[-1])

    def build(self, num_rows: int, num_tokens: int, max_query: int, max_context: int, num_samples: int) -> StepInputs:
        self._apply()
        of_tokens, of_rows, last = kernels.build(
            self._ring.on_device,
            self._rows,
            self.tokens,
            self.block_tables,
            self.device_prompt_lengths,
            self._block_sizes,
            max(num_rows, num_samples),
            num_tokens,
            max_query,
        )
        input_ids, positions, lengths, *mappings = of_tokens
        of_row, query_start = self._view(0, num_rows), self._view(2, num_rows + 1)
        lengths_of_rows = query_start, of_rows[0, :num_rows], of_row
        # Records of work hold no places of blocks, so columns of one group share them
        prepared: list[dict[Any, Any]] = [{} for _ in self._groups.groups]
        shared = [
            of_group
            for of_group, group in zip(prepared, self._groups.groups, strict=True)
            for _ in range(group.columns)
        ]
        metadata: list[Metadata] = [
            DeviceMetadata(mapping, *lengths_of_rows, tables, max_query, max_context, of_column)
            for mapping, tables, of_column in zip(mappings, self._tables, shared, strict=True)
        ]
        slots, ends = of_rows[1:, :num_samples]
        last = last[:num_samples]
        return StepInputs(input_ids, positions, lengths, metadata, last, slots, ends, self.device_prompt_lengths)

    def store(self, sampled: Tensor) -> None:
        """Store the sampled tokens [R] of the staged step for later steps and for `result`.

        This runs entirely on the device.
        """
        kernels.store(self._ring.on_device, self._rows, sampled, self.tokens, self._results)

    def store_rows(self, plan: StepPlan, samples: NDArray[np.int64], sampled: Tensor) -> None:
        rows, later = (part[samples] for part in plan.sampled())
        ends = (plan.starts + plan.counts)[rows] - later
        slots, columns, places = to_device(np.stack((plan.slots[rows], ends, samples)), self.tokens.device).unbind()
        self.tokens[slots, columns] = sampled.clamp(min=0).int()
        self._results[self._result, places] = sampled.int()

    def result(self, number: int) -> Tensor:
        """Return the tokens int32 [number] sampled by the staged step; call it once per step.

        They stay valid for `RESULTS` - 1 more steps.
        """
        row = self._results[self._result, :number]
        self._result = (self._result + 1) % RESULTS
        return row

    def _view(self, part: int, size: int) -> Tensor:
        first = kernels.FIRST + part * self._rows
        return self._ring.on_device[first : first + size]

    def _apply(self) -> None:
        kernels.apply_runs(self._ring.on_device, self._rows, self.tokens, self.block_tables, self.device_prompt_lengths)

    def _fill(self, buffer: NDArray[np.int32], plan: StepPlan, rows: int) -> int:
        """Write rows and samples to the buffer; return the number of samples."""
        number, stride = len(plan.slots), self._rows
        slots = buffer[kernels.FIRST :]
        starts, query_start, sampling = slots[stride:], slots[2 * stride :], slots[3 * stride + kernels.FIRST :]
        slots[:number], slots[number:rows] = plan.slots, 0
        starts[:number], starts[number:rows] = plan.starts, 0
        query_start[0] = 0
        np.cumsum(plan.counts, out=query_start[1 : number + 1])
        query_start[number + 1 : rows + 1] = query_start[number] + self._counting[1 : rows - number + 1]
        sampled, later = plan.sampled()
        if len(sampled) > stride:
            raise ValueError(f"{len(sampled)} samples in a step, at most {stride}")
        sampling[: len(sampled)] = sampled + self._rows * later
        # A program with a sample and without a row gets no tokens
        query_start[rows + 1 : len(sampled) + 1] = query_start[rows]
        return len(sampled)

    def _send(self, buffer: NDArray[np.int32], rows: int, samples: int, writes: list[Write]) -> None:
        runs = [
            (table, row, column + first, min(kernels.CHUNK, len(values) - first))
            for table, row, column, values in writes
            for first in range(0, len(values), kernels.CHUNK)
        ]
        buffer[:4] = rows, samples, len(runs), self._result
        end = at = self._runs_at + kernels.RUN * len(runs)
        for _, _, _, values in writes:
            buffer[end : end + len(values)] = values
            end += len(values)
        if runs:
            described = buffer[self._runs_at : at].reshape(-1, kernels.RUN)
            described[:, :4] = runs
            described[:, 4] = at
            described[1:, 4] += np.cumsum(described[:-1, 3])
        self._ring.send(end)

    def _pieces(self, plan: StepPlan) -> Iterator[list[Write]]:
        """Yield all writes, in pieces that fit into a buffer; at least one piece."""
        piece: list[Write] = []
        words = 0
        for write in self._writes(plan):
            size = len(write[3]) + kernels.RUN * (len(write[3]) // kernels.CHUNK + 1)
            if words + size > _BUFFER_WORDS:
                yield piece
                piece, words = [], 0
            piece.append(write)
            words += size
        yield piece

    def _writes(self, plan: StepPlan) -> Iterator[Write]:
        for request in plan.added:
            yield kernels.PROMPT_LENGTHS, request.slot, 0, [request.prompt_length]
            yield from _parts(kernels.TOKENS, request.slot, 0, request.token_ids)
        slots = self.block_tables.shape[1]
        for new in plan.new_blocks:
            column = sum(group.columns for group in self._groups.groups[: new.group])
            first, of_columns = column_pages(self._groups, new)
            for index, pages in enumerate(of_columns, column):
                yield from _parts(kernels.BLOCKS, index * slots + new.slot, first, pages)


def _parts(table: int, row: int, column: int, values: Sequence[int]) -> Iterator[Write]:
    for first in range(0, len(values), _MOST_VALUES):
        yield table, row, column + first, values[first : first + _MOST_VALUES]
