"""Build a step's inputs on the device from tables by slot.

- `apply_runs` updates the tables.
- `build` makes the input tensors of the model and its attention.
- `store` writes sampled tokens to the token table for later steps.

All three read the data of a step from one buffer of 32-bit words, so that a launch can be recorded
in a CUDA graph:

- words 0 to 3: numbers of rows, samples and runs, and the step's row of the results
- from FIRST on: slots [ROWS], starts [ROWS], query_start [ROWS + FIRST], samples [ROWS]
- then the runs, RUN words each: table, row, column, number of values, their offset in the buffer

ROWS is the largest number of rows or samples, rounded up to a multiple of FIRST. A sample is
encoded as its row, plus ROWS times the number of the row's samples after it. Rows beyond the step's
own are padding: each has one token, which is written to the null block, and no context. Samples of
padding are for the slot after the last, which no request uses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FIRST = 16
RUN = 5
CHUNK = 1024
"""Most values of one run."""

TOKENS, BLOCKS, PROMPT_LENGTHS = range(3)
"""The tables that runs write to."""

_PROGRAMS = 64
_TOKENS_AT_ONCE = 128
_FIRST, _RUN, _CHUNK = tl.constexpr(FIRST), tl.constexpr(RUN), tl.constexpr(CHUNK)


def runs_at(rows: int) -> int:
    """Return the offset of the runs in a buffer for `rows` rows, a multiple of `FIRST`."""
    return FIRST + 4 * rows + FIRST


@triton.jit
def _apply_runs(
    staged, tokens, block_tables, prompt_lengths, columns, max_blocks, ROWS: tl.constexpr, PROGRAMS: tl.constexpr
):
    runs = staged + _FIRST + 4 * ROWS + _FIRST
    for index in range(tl.program_id(0), tl.load(staged + 2), PROGRAMS):
        run = runs + index * _RUN
        table, row, column = tl.load(run), tl.load(run + 1).to(tl.int64), tl.load(run + 2)
        number, source = tl.load(run + 3), tl.load(run + 4)
        offsets = tl.arange(0, _CHUNK)
        inside = offsets < number
        values = tl.load(staged + source + offsets, mask=inside, other=0)
        if table == 0:
            tl.store(tokens + row * columns + column + offsets, values, mask=inside)
        elif table == 1:
            tl.store(block_tables + row * max_blocks + column + offsets, values, mask=inside)
        else:
            tl.store(prompt_lengths + row + offsets, values, mask=inside)


@triton.jit
def _build(
    staged,
    tokens,  # int32 [slots, columns]
    block_tables,  # int32 [block tables, slots, max_blocks]
    prompt_lengths,  # int32 [slots]
    columns,
    max_blocks,
    num_slots,
    of_tokens,  # int64 [3 + block tables, token_stride], out: see `build`
    token_stride,
    of_rows,  # int32 [3, row_stride], out: context lengths; slot and length of the samples
    row_stride,
    last,  # int64 [num_rows], out: the token after which each sample comes
    BLOCK_SIZES: tl.constexpr,  # of each block table
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Build BLOCK tokens of one row per program; the row's first program also builds the row's own
    values and one sample.
    """
    row = tl.program_id(0)
    slots = staged + _FIRST
    starts = slots + ROWS
    query_start = starts + ROWS
    sampling = query_start + ROWS + _FIRST
    real = row < tl.load(staged)
    first, behind = tl.load(query_start + row), tl.load(query_start + row + 1)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < behind - first
    known = offset < tl.where(real, behind - first, 0)
    position = start + offset
    token = tl.load(tokens + slot * columns + position, mask=known, other=0)
    length = tl.maximum(tl.load(prompt_lengths + slot), position + 1)
    place = of_tokens + first + offset
    tl.store(place, token.to(tl.int64), mask=inside)
    tl.store(place + token_stride, tl.where(known, position, 0).to(tl.int64), mask=inside)
    tl.store(place + 2 * token_stride, tl.where(known, length, 1).to(tl.int64), mask=inside)
    for table in tl.static_range(len(BLOCK_SIZES)):
        block_size = BLOCK_SIZES[table]
        blocks = block_tables + (table * num_slots + slot) * max_blocks
        block = tl.load(blocks + position // block_size, mask=known, other=0).to(tl.int64)
        mapping = tl.where(known, block * block_size + position % block_size, 0)
        tl.store(place + (3 + table) * token_stride, mapping, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(of_rows + row, tl.where(real, start + behind - first, 0))
        sample = tl.load(sampling + row)
        samples = row < tl.load(staged + 1)
        sampled = sample % ROWS
        end = tl.load(query_start + sampled + 1, mask=samples, other=1) - tl.where(samples, sample // ROWS, 0)
        known_after = (
            tl.load(starts + sampled, mask=samples, other=0)
            + end
            - tl.load(query_start + sampled, mask=samples, other=0)
        )
        tl.store(of_rows + row_stride + row, tl.load(slots + sampled, mask=samples, other=num_slots))
        tl.store(of_rows + 2 * row_stride + row, known_after)
        tl.store(last + row, (end - 1).to(tl.int64))


@triton.jit(do_not_specialize=["number"])
def _store(staged, sampled, number, tokens, columns, results, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = (index < number) & (index < tl.load(staged + 1))
    slots = staged + _FIRST
    starts = slots + ROWS
    query_start = starts + ROWS
    sample = tl.load(query_start + ROWS + _FIRST + index, mask=real, other=0)
    row = sample % ROWS
    slot = tl.load(slots + row, mask=real, other=0).to(tl.int64)
    count = tl.load(query_start + row + 1, mask=real, other=0) - tl.load(query_start + row, mask=real, other=0)
    column = tl.load(starts + row, mask=real, other=0) + count - sample // ROWS
    token = tl.load(sampled + index, mask=real, other=0).to(tl.int32)
    tl.store(tokens + slot * columns + column, tl.maximum(token, 0), mask=real)
    tl.store(results + tl.load(staged + 3) * ROWS + index, token, mask=real)


def apply_runs(staged: Tensor, rows: int, tokens: Tensor, block_tables: Tensor, prompt_lengths: Tensor) -> None:
    """Write the runs' values into the tables by slot; may be repeated."""
    _apply_runs[(_PROGRAMS,)](
        staged,
        tokens,
        block_tables,
        prompt_lengths,
        tokens.shape[1],
        block_tables.shape[-1],
        ROWS=rows,
        PROGRAMS=_PROGRAMS,
    )


def build(
    staged: Tensor,
    rows: int,
    tokens: Tensor,
    block_tables: Tensor,
    prompt_lengths: Tensor,
    block_sizes: tuple[int, ...],
    num_rows: int,
    num_tokens: int,
    max_query: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input tensors of a step.

    1. int64 [3 + block tables, num_tokens]: input ids, positions, lengths, and a slot mapping for
       each block table
    2. int32 [3, num_rows]: context lengths of the rows, slots of the samples (for padding: the slot
       after the last), and numbers of tokens before the samples
    3. int64 [num_rows]: the token after which each sample comes

    `num_rows` is the number of rows or of samples, whichever is larger.
    """
    # The rows of both tensors are aligned for all lengths: another alignment would compile another
    # kernel.
    token_stride, row_stride = aligned(num_tokens), aligned(num_rows)
    of_tokens = torch.empty((3 + len(block_sizes), token_stride), dtype=torch.int64, device=staged.device)
    of_rows = torch.empty((3, row_stride), dtype=torch.int32, device=staged.device)
    last = torch.empty(num_rows, dtype=torch.int64, device=staged.device)
    block = 1 if max_query == 1 else _TOKENS_AT_ONCE
    _build[(num_rows, triton.cdiv(max_query, block))](
        staged,
        tokens,
        block_tables,
        prompt_lengths,
        tokens.shape[1],
        block_tables.shape[-1],
        prompt_lengths.shape[0],
        of_tokens,
        token_stride,
        of_rows,
        row_stride,
        last,
        BLOCK_SIZES=block_sizes,
        ROWS=rows,
        BLOCK=block,
    )
    return of_tokens[:, :num_tokens], of_rows[:, :num_rows], last


def store(staged: Tensor, rows: int, sampled: Tensor, tokens: Tensor, results: Tensor) -> None:
    """Write the sampled tokens [R] to the token table and to the step's row of the results.

    The table gets token 0 in the place of a negative number.
    """
    number = sampled.shape[0]
    _store[(triton.cdiv(number, _TOKENS_AT_ONCE),)](
        staged, sampled, number, tokens, tokens.shape[1], results, ROWS=rows, BLOCK=_TOKENS_AT_ONCE
    )


def aligned(number: int) -> int:
    """Return a number rounded up, so that rows as long as this are aligned alike."""
    return -(-number // FIRST) * FIRST
