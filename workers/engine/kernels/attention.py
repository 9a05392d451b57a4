"""Paged attention in three kernels.

- `plan` splits a step's rows into pieces of work, once for all layers.
- `attend` computes a piece.
- `combine` adds up the pieces of blocks that were split along the context.

A piece is a block of queries of one row against a stretch of the row's keys, for one key-value
head. The query heads that share the head are beside each other in the matrix tile: tile row m is
query m // GROUP of the block, head m % GROUP of the group. The softmax is taken online (Milakov and
Gimelshein, 2018; Dao, 2023: FlashAttention-2), splitting the context follows Dao et al., 2023
(Flash-Decoding). The grid depends only on values on the host. All lengths are read from memory, so
that a launch can be recorded in a CUDA graph.

The cache of a layer is [2, num_blocks, kv_heads, block_size, d], keys before values. It may have
any block size: a tile gathers its keys token by token, d contiguous elements each. Keys before a
window may have been freed: they are neither looked up nor multiplied.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton import knobs

# Columns of a piece's record: first query's token, number of queries, first query's position,
# first key, last key (exclusive), slot, index of its partial result (-1: not split), number of
# pieces along the context.
RECORD = tl.constexpr(8)
_CLASSES = tl.constexpr(8)  # classes of length that order the rows
_PRECISION = tl.constexpr(
    "tf32x3"
)  # of float32 products: three of TensorFloat-32, nearly exact, without register spilling
LOG2_E = tl.constexpr(math.log2(math.e))
_FAR_BELOW = tl.constexpr(-1.0e30)  # below every score, yet finite: a difference of two is a number
_LARGEST_FP16 = tl.constexpr(65504.0)


def dot_type(dtype: torch.dtype, cache_dtype: torch.dtype) -> tl.dtype:
    """Return the type in which `attend` multiplies queries of `dtype` with keys of `cache_dtype`.

    It is `dtype`, with two exceptions: float32 in the interpreter, which would multiply bit
    patterns, and float16 for a cache in fp8, since one instruction converts fp8 to it.
    """
    if dtype == torch.float32 or knobs.runtime.interpret:
        return tl.float32
    if cache_dtype == torch.float8_e4m3fn:
        return tl.float16
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "share"])
def plan(
    query_start,  # int32 [num_rows + 1]
    context_lens,  # int32 [num_rows]
    slots,  # int32 [num_rows]
    records,  # int32 [num_pieces, RECORD], out
    leaders,  # int32 [share], out: the first pieces of split blocks, padded with -1
    scratch,  # int32 [4, 2**LEVELS]
    num_rows,
    num_pieces,
    share,  # pieces of equal size for all rows' work; 0: no split
    BEFORE: tl.constexpr,  # most tokens before its own (AFTER: after it) that a query sees; -1: all
    AFTER: tl.constexpr,
    CHUNK: tl.constexpr,  # tokens of a chunk, before which a query sees none; 0: no chunks
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,  # least tiles of keys in a piece
    LEVELS: tl.constexpr,  # 2**LEVELS is at least num_rows
    PIECES: tl.constexpr,  # written at once
):
    """Plan the pieces of a step, in one program.

    A row is split along its context only if it is longer than an even share. Pieces of long rows
    come first, so that the last pieces on the GPU are small (Graham, 1969).
    """
    ROWS: tl.constexpr = 1 << LEVELS
    rank = tl.arange(0, ROWS)
    _, _, _, length = _row(query_start, context_lens, rank, rank < num_rows, BEFORE, AFTER, BLOCK_Q, TILE)
    order = length * _CLASSES // (tl.max(length, 0) + 1)
    place = rank
    shorter = 0
    for size in tl.static_range(_CLASSES):
        member = (order == size).to(tl.int32)
        place = tl.where(member > 0, shorter + tl.cumsum(member, 0) - 1, place)
        shorter += tl.sum(member, 0)
    tl.store(scratch + place, rank)
    tl.debug_barrier()
    row = tl.load(scratch + rank)
    _, queries, _, tiles = _row(query_start, context_lens, row, row < num_rows, BEFORE, AFTER, BLOCK_Q, TILE)
    blocks = tl.cdiv(queries, BLOCK_Q)
    piece_tiles = tl.maximum(MIN_TILES, tl.cdiv(tl.sum(blocks * tiles, 0), tl.maximum(share, 1)))
    piece_tiles = tl.where(share > 0, piece_tiles, 0x7FFFFFFF // TILE)
    parts = tl.maximum(tl.cdiv(tiles, piece_tiles), 1)
    pieces = blocks * parts
    partials = tl.where(parts > 1, pieces, 0)
    cut = tl.where(parts > 1, blocks, 0)
    total = tl.sum(pieces, 0)
    tl.store(scratch + ROWS + rank, tl.cumsum(pieces, 0))
    tl.store(scratch + 2 * ROWS + rank, tl.cumsum(partials, 0) - partials)
    tl.store(scratch + 3 * ROWS + rank, tl.cumsum(cut, 0) - cut)
    for first in range(0, share, PIECES):
        leader = first + tl.arange(0, PIECES)
        tl.store(leaders + leader, tl.full([PIECES], -1, tl.int32), mask=leader < share)
    tl.debug_barrier()
    for first in range(0, num_pieces, PIECES):
        _write_records(
            first + tl.arange(0, PIECES),
            num_pieces,
            total,
            piece_tiles,
            query_start,
            context_lens,
            slots,
            records,
            leaders,
            scratch,
            BEFORE,
            AFTER,
            CHUNK,
            BLOCK_Q,
            TILE,
            LEVELS,
        )


@triton.jit
def _row(
    query_start,
    context_lens,
    row,
    mask,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return a row's first token, number of queries and context, and the most tiles of keys that a
    block of its queries sees.
    """
    start = tl.load(query_start + row, mask=mask, other=0)
    queries = tl.load(query_start + row + 1, mask=mask, other=0) - start
    context = tl.load(context_lens + row, mask=mask, other=0)
    span = context
    if BEFORE >= 0 and AFTER >= 0:
        span = tl.minimum(context, BEFORE + AFTER + 1 + BLOCK_Q + TILE)
    return start, queries, context, tl.cdiv(span, TILE)


@triton.jit
def _oldest(position, BEFORE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that a query sees, which does not see all."""
    return tl.maximum(position, 0) // CHUNK * CHUNK if CHUNK > 0 else tl.maximum(position - BEFORE, 0)


@triton.jit
def _write_records(
    piece,
    num_pieces,
    total,
    piece_tiles,
    query_start,
    context_lens,
    slots,
    records,
    leaders,
    scratch,
    BEFORE: tl.constexpr,  # most tokens before its own (AFTER: after it) that a query sees; -1: all
    AFTER: tl.constexpr,
    CHUNK: tl.constexpr,  # tokens of a chunk, before which a query sees none; 0: no chunks
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    ROWS: tl.constexpr = 1 << LEVELS
    used = piece < total
    rank = piece * 0  # rank of the first row that ends after the piece, found bit by bit
    for level in tl.static_range(1, LEVELS + 1):
        rank = tl.where(tl.load(scratch + ROWS + rank + (ROWS >> level) - 1) <= piece, rank + (ROWS >> level), rank)
    row = tl.load(scratch + rank)
    start, queries, context, tiles = _row(query_start, context_lens, row, used, BEFORE, AFTER, BLOCK_Q, TILE)
    parts = tl.maximum(tl.cdiv(tiles, piece_tiles), 1)
    within = piece - (tl.load(scratch + ROWS + rank) - tl.cdiv(queries, BLOCK_Q) * parts)
    block, part = within // parts, within % parts
    count = tl.minimum(queries - block * BLOCK_Q, BLOCK_Q)
    position = context - queries + block * BLOCK_Q
    end = tl.minimum(position + count + AFTER, context) if AFTER >= 0 else context
    begin = _oldest(position, BEFORE, CHUNK) // TILE * TILE if BEFORE >= 0 else piece * 0
    cut = parts > 1
    partial = tl.where(cut, tl.load(scratch + 2 * ROWS + rank) + within, -1)
    first = tl.where(cut, begin + part * piece_tiles * TILE, begin)
    last = tl.where(cut, tl.minimum(end, first + piece_tiles * TILE), end)
    # In reverse: long rows first, and in a prompt the last queries, which see the most keys.
    place = tl.where(used, total - 1 - piece, piece)
    record, mask = records + place * RECORD, piece < num_pieces
    tl.store(record, start + block * BLOCK_Q, mask=mask)
    tl.store(record + 1, tl.where(used, count, 0), mask=mask)
    tl.store(record + 2, position, mask=mask)
    tl.store(record + 3, first, mask=mask)
    tl.store(record + 4, last, mask=mask)
    tl.store(record + 5, tl.load(slots + row, mask=used, other=0), mask=mask)
    tl.store(record + 6, partial, mask=mask)
    tl.store(record + 7, parts, mask=mask)
    tl.store(leaders + tl.load(scratch + 3 * ROWS + rank) + block, place, mask=used & cut & (part == 0))


@triton.jit
def _tiles(
    q,
    weighted,
    top,
    total,
    keys,
    values,
    table,
    positions,
    oldest,
    first,
    last,
    scale,
    soft_cap,
    bias,
    q_head,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CHUNK: tl.constexpr,
    REACH: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the keys from `first`, a multiple of TILE, to `last` to the running softmax.

    No query sees a key before `oldest`.

    Without MASKED, every query sees all of these keys.
    """
    d = tl.arange(0, BLOCK_D)
    whole_head: tl.constexpr = HEAD_DIM == BLOCK_D
    # Blocks are looked up one tile ahead, so that loads of keys and values do not wait for another
    # load of their iteration: dependent loads would keep only half as many bytes in flight. After
    # the last key, its block is used again, so that only the row's blocks are read.
    place = tl.minimum(first + tl.arange(0, TILE), tl.maximum(last, 1) - 1)
    block = tl.load(table + (tl.maximum(place, oldest) if BEFORE >= 0 else place) // BLOCK_SIZE)
    for tile in tl.range(first, last, TILE):
        key = tile + tl.arange(0, TILE)
        places = block.to(tl.int64) * BLOCK_STRIDE + key % BLOCK_SIZE * HEAD_DIM
        block = tl.load(table + tl.minimum(key + TILE, last - 1) // BLOCK_SIZE)
        offsets = places[:, None] + d[None, :]
        k = tl.load(keys + offsets) if whole_head else tl.load(keys + offsets, mask=d[None, :] < HEAD_DIM, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision=_PRECISION)
        if soft_cap is not None:
            # By tanh(x) = 1 - 2 / (exp(2 x) + 1), whose exponential may be infinite
            scores = soft_cap - 2 * soft_cap / (tl.exp2(scores * (2 * LOG2_E / soft_cap)) + 1)
        if bias is not None:
            ahead = tl.minimum(tl.maximum(key[None, :] - positions[:, None], -REACH), REACH)
            added = tl.load(bias + q_head[:, None] * (2 * REACH + 1) + ahead + REACH)
            scores += added * (LOG2_E / scale)
        if MASKED:
            seen = key[None, :] <= positions[:, None] if AFTER == 0 else (key < last)[None, :]
            if AFTER > 0:
                seen = seen & (key[None, :] <= positions[:, None] + AFTER)
            if BEFORE >= 0:
                seen = seen & (key[None, :] >= _oldest(positions, BEFORE, CHUNK)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        # Other keys' memory may contain NaN, and zero times NaN is NaN, so it is replaced
        inside = (key < last) & (key >= oldest) if BEFORE >= 0 else key < last
        if MASKED and whole_head:
            v = tl.load(values + offsets, mask=inside[:, None], other=0.0)
        elif MASKED:
            v = tl.load(values + offsets, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        elif whole_head:
            v = tl.load(values + offsets)
        else:
            v = tl.load(values + offsets, mask=d[None, :] < HEAD_DIM, other=0.0)
        v = v.to(DOT)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision=_PRECISION)
        top = new_top
    return weighted, top, total


@triton.jit(do_not_specialize=["scale", "num_blocks"])
def attend(
    q,  # [T, heads, d], any stride between tokens
    cache,  # [2, num_blocks, kv_heads, block_size, d]
    block_tables,  # int32 [num_slots, table_stride]
    records,  # int32 [num_pieces, RECORD]
    out,  # [T, heads, d]
    partials,  # float32 [num_partials, kv_heads, BLOCK_Q * GROUP, d]
    # Float32 [num_partials, kv_heads, BLOCK_Q * GROUP], log2 of the sum of exponentials
    partial_sums,
    bias,  # float32 [heads, 2 * REACH + 1], or None
    sinks,  # float32 [heads], or None
    scale,  # log2(e) times the model's scale
    soft_cap,  # limit of scores that are not yet scaled, or None
    num_blocks,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CHUNK: tl.constexpr,
    REACH: tl.constexpr,  # reach of the bias
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PREFILL: tl.constexpr,  # tiles without a mask run in a separate loop
    DOT: tl.constexpr,
):
    """Compute a piece. Program (piece, key-value head), for decode rows (key-value head, piece).

    A row without context gets zeros.

    Concurrent programs share data in the GPU's cache: for a prompt the keys of one head, for a
    decode row the blocks, which hold the heads one after another.
    """
    record = records + tl.program_id(0 if PREFILL else 1) * RECORD
    head = tl.program_id(1 if PREFILL else 0)
    token, queries, position = tl.load(record).to(tl.int64), tl.load(record + 1), tl.load(record + 2)
    first, last = tl.load(record + 3), tl.load(record + 4)
    slot, partial = tl.load(record + 5).to(tl.int64), tl.load(record + 6).to(tl.int64)
    if queries == 0:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = m // GROUP
    q_head = head * GROUP + m % GROUP
    mask = (query < queries)[:, None] & (d < HEAD_DIM)[None, :]
    tile = tl.load(q + ((token + query) * q_stride + q_head * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0)
    if tl.float16 == DOT and q.dtype.element_ty == tl.bfloat16:
        tile = tl.clamp(tile.to(tl.float32), -_LARGEST_FP16, _LARGEST_FP16)
    tile = tile.to(DOT)
    positions = position + query
    keys = cache + head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + num_blocks.to(tl.int64) * BLOCK_STRIDE
    table = block_tables + slot * table_stride
    oldest = _oldest(position, BEFORE, CHUNK) if BEFORE >= 0 else position * 0

    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], _FAR_BELOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # To the pieces of a split block, `combine` adds the sink
        top = tl.where(partial < 0, tl.load(sinks + q_head) * LOG2_E, top)
        total = tl.where(partial < 0, 1.0, total)
    if PREFILL:
        middle = first
        if BEFORE >= 0:
            # From this key on, the last query sees all
            entered = tl.cdiv(_oldest(position + queries - 1, BEFORE, CHUNK), TILE) * TILE
            middle = tl.maximum(first, tl.minimum(entered, last))
            weighted, top, total = _tiles(
                tile, weighted, top, total, keys, values, table, positions, oldest, first, middle, scale, soft_cap,
                bias, q_head, BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, BEFORE, AFTER, CHUNK, REACH, True, DOT,
            )  # fmt: skip
        seen_by_first = tl.minimum(position + 1 + AFTER, last) if AFTER >= 0 else last
        diagonal = tl.maximum(middle, seen_by_first // TILE * TILE)
        weighted, top, total = _tiles(
            tile, weighted, top, total, keys, values, table, positions, oldest, middle, diagonal, scale, soft_cap, bias,
            q_head, BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, BEFORE, AFTER, CHUNK, REACH, False, DOT,
        )  # fmt: skip
        first = diagonal
    weighted, top, total = _tiles(
        tile, weighted, top, total, keys, values, table, positions, oldest, first, last, scale, soft_cap, bias, q_head,
        BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, BEFORE, AFTER, CHUNK, REACH, True, DOT,
    )  # fmt: skip

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    weighted *= (1.0 / total)[:, None]
    if partial < 0:
        places = ((token + query) * (KV_HEADS * GROUP) + q_head) * HEAD_DIM
        tl.store(out + places[:, None] + d[None, :], weighted.to(out.dtype.element_ty), mask=mask)
    else:
        places = (partial * KV_HEADS + head) * (BLOCK_Q * GROUP) + m
        tl.store(partials + places[:, None] * HEAD_DIM + d[None, :], weighted, mask=mask)
        tl.store(partial_sums + places, tl.where(nothing, _FAR_BELOW, top + tl.log2(total)), mask=query < queries)


@triton.jit
def combine(
    records,
    leaders,
    out,
    partials,
    partial_sums,
    sinks,  # as those of `attend`
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add up the pieces along a context; their partial results are adjacent.

    Program (leader, key-value head, BLOCK_M tile rows).
    """
    leader, head = tl.load(leaders + tl.program_id(0)), tl.program_id(1)
    if leader < 0:
        return
    record = records + leader * RECORD
    place, parts = tl.load(record + 6).to(tl.int64), tl.load(record + 7)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = m // GROUP
    present = query < tl.load(record + 1)
    mask = present[:, None] & (d < HEAD_DIM)[None, :]
    step: tl.constexpr = KV_HEADS * BLOCK_Q * GROUP
    places = (place * KV_HEADS + head) * (BLOCK_Q * GROUP) + m
    top = tl.full([BLOCK_M], _FAR_BELOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + m % GROUP) * LOG2_E
        top = tl.maximum(top, sink)
    for part in range(parts):
        top = tl.maximum(top, tl.load(partial_sums + places + part * step, mask=present, other=_FAR_BELOW))
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sinks is not None:
        total += tl.exp2(sink - top)
    for part in tl.range(parts, num_stages=4):
        share = tl.exp2(tl.load(partial_sums + places + part * step, mask=present, other=_FAR_BELOW) - top)
        weighted += share[:, None] * tl.load(
            partials + (places + part * step)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0
        )
        total += share
    weighted *= (1.0 / total)[:, None]
    token = tl.load(record).to(tl.int64)
    target = ((token + query) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP) * HEAD_DIM
    tl.store(out + target[:, None] + d[None, :], weighted.to(out.dtype.element_ty), mask=mask)
