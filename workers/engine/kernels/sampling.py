"""The draw on a device, without a sort, in five kernels.

Their launches do not depend on values, so that they can be recorded in a CUDA graph.

A row's candidates are ordered by their distance from its largest logit, (largest - logit) /
temperature. The distance is a float of at least 0, so its bits have the same order as integers.
min_p, top-k and top-p each become a largest distance.

1. `_largest` finds the largest logit of each part of each row; a greedy row needs no more. NaN is
   infinity there, and `_choose` draws from no row whose largest logit is not finite.
2. `_draw_parts` draws from rows with neither top-k nor top-p, part by part.
3. `_measure` counts, for all other rows, the candidates or their weight within each of `PIVOTS`.
4. `_gather` writes the candidates within the first sufficient pivot to adjacent places.
5. `_choose` combines the parts. It finds the ends of top-k and top-p among the gathered candidates
   by bisection over the bits, and draws. For a row with more than `GATHERED` candidates, each step
   of the bisection reads all logits.

The noise is that of `workers.engine.sampling.noise`, bit for bit up to its logarithms. The
logarithms are computed only for blocks with a token that may win, judged by its integer: a score of
more than b needs noise of more than b + distance, thus bits below 2^32 * exp(-b - distance).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.messages import step
from workers.engine.sampling import noise

# Words of a slot's parameters, 32 bits each; floats and 64-bit integers as bits, low half first
WORDS = 8
TEMPERATURE, FLOOR, TOP_K, TOP_P, SEED, CHOICE = 0, 1, 2, 3, 4, 6
"""Index of each parameter; `FLOOR` is the largest distance that min_p allows."""

PIVOTS = (0.5, 1.0, 2.0, 3.5, 5.5, 8.0, 11.0, 15.0)
GATHERED = 4096  # candidates that one program holds in registers

_BLOCK = 2048
_PARTS = 64  # most parts of a row
_PROGRAMS = 1024  # least programs of a step
_WARPS = 8

_TEMPERATURE, _FLOOR, _TOP_K, _TOP_P = (
    tl.constexpr(TEMPERATURE),
    tl.constexpr(FLOOR),
    tl.constexpr(TOP_K),
    tl.constexpr(TOP_P),
)
_SEED, _CHOICE, _WORDS = tl.constexpr(SEED), tl.constexpr(CHOICE), tl.constexpr(WORDS)
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(noise.GOLDEN), tl.constexpr(noise.MIX_1), tl.constexpr(noise.MIX_2)
_NO_TOKEN, _NOT_FINITE = tl.constexpr(step.NO_TOKEN), tl.constexpr(step.NOT_FINITE)
_MEASURES = tl.constexpr(16)  # measures of a part: one per pivot, then the total
_MOST_NOISE = tl.constexpr(23.0)  # -log(-log1p(-2^-33)) is 22.9
# The weights of gathered candidates are integers, so that their sum does not depend on the order
_UNIT = tl.constexpr(2.0**40)
_SLACK = tl.constexpr(1.00001)  # factor on the goal of a pivot's weight, for sums in float32

# Compiled once for all numbers of rows: they affect only counts, and offsets of views in tensors.
_kernel = triton.jit(
    do_not_specialize=["span", "parts"],
    do_not_specialize_on_alignment=[
        "slots",
        "lengths",
        "prompt_lengths",
        "largest",
        "best",
        "greedy",
        "scores",
        "drawn",
        "found",
    ],
)


def draw(logits: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor | None) -> Tensor:
    """Draw one token per row of logits [R, vocab]; return int32 [R].

    - `logits` may have any float dtype and are not changed.
    - `table`: int32 [slots, WORDS]; `slots`: int32 [R].
    - `lengths`: int32 [R], a row's tokens so far; only its output if there are no `prompt_lengths`.
    - `prompt_lengths`: int32, by slot; not read for greedy rows.

    A row's token is NO_TOKEN if all its logits are minus infinity, and NOT_FINITE if one is NaN or
    infinity.
    """
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens
    span, parts = _split(rows, vocab)
    largest = torch.empty((2, rows, parts), dtype=torch.float32, device=device)
    best = torch.empty((2, rows, parts), dtype=torch.int32, device=device)
    measured = torch.empty((rows, parts, _MEASURES.value), dtype=torch.float32, device=device)
    found = torch.empty((rows, 2), dtype=torch.float32, device=device)
    gathered = torch.empty((2, rows, GATHERED), dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    asked = (table, slots)
    numbers = (logits.stride(0), vocab, span, parts)
    constants: dict[str, Any] = {"PARTS": _PARTS, "BLOCK": _BLOCK, "num_warps": _WARPS}
    scores, distances = largest[1], gathered[0].view(torch.float32)
    _largest[(rows, parts)](logits, largest[0], best[0], counts, *numbers, BLOCK=_BLOCK, num_warps=_WARPS)
    _draw_parts[(rows, parts)](
        logits, *asked, lengths, prompt_lengths, largest[0], scores, best[1], *numbers, **constants
    )
    _measure[(rows, parts)](logits, *asked, largest[0], measured, *numbers, PIVOTS=PIVOTS, **constants)
    _gather[(rows, parts)](
        logits,
        *asked,
        largest[0],
        measured,
        found,
        distances,
        gathered[1],
        counts,
        *numbers,
        PIVOTS=PIVOTS,
        GATHERED=GATHERED,
        **constants,
    )
    _choose[(rows,)](
        logits,
        *asked,
        lengths,
        prompt_lengths,
        largest[0],
        best[0],
        scores,
        best[1],
        measured,
        found,
        distances,
        gathered[1],
        counts,
        tokens,
        *numbers,
        GATHERED=GATHERED,
        **constants,
    )
    return tokens


def _split(rows: int, vocab: int) -> tuple[int, int]:
    """Return the blocks of one part and the parts of a row, for enough programs."""
    blocks = triton.cdiv(vocab, _BLOCK)
    span = triton.cdiv(blocks, max(1, min(_PARTS, blocks, _PROGRAMS // rows)))
    return span, triton.cdiv(blocks, span)


@_kernel
def _largest(logits, largest, best, counts, stride, vocab, span, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    top, at = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for block in range(part * span, _end(part, span, vocab, BLOCK)):
        token = block * BLOCK + lane
        logit = tl.load(logits + row * stride + token, token < vocab, -float("inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))  # so that NaN is the largest
        at = tl.where(logit > top, token, at)
        top = tl.where(logit > top, logit, top)
    most = tl.max(top, 0)
    tl.store(largest + row * parts + part, most)
    tl.store(best + row * parts + part, tl.min(tl.where(top == most, at, vocab - 1), 0))
    if part == 0:
        tl.store(counts + row, 0)


@_kernel
def _draw_parts(
    logits,
    table,
    slots,
    lengths,
    prompt_lengths,
    largest,
    scores,
    drawn,
    stride,
    vocab,
    span,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature, floor, top_k, top_p = _limits(table, slot)
    if (temperature > 0) & (top_k >= vocab) & (top_p >= 1):
        most = _most(largest, row, parts, PARTS)
        key = _key(table, slot, lengths, prompt_lengths, row)
        end = _end(part, span, vocab, BLOCK)
        score, token = _drawn(logits + row * stride, part * span, end, vocab, most, temperature, floor, key, BLOCK)
        tl.store(scores + row * parts + part, score)
        tl.store(drawn + row * parts + part, token)


@_kernel
def _measure(
    logits,
    table,
    slots,
    largest,
    measured,
    stride,
    vocab,
    span,
    parts,
    PIVOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, floor, top_k, top_p = _limits(table, tl.load(slots + row))
    if (temperature > 0) & ((top_k < vocab) | (top_p < 1)):
        most = _most(largest, row, parts, PARTS)
        lane = tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], tl.float32)
        a, b, c, d, e, f, g, h, total = zero, zero, zero, zero, zero, zero, zero, zero, zero
        for block in range(part * span, _end(part, span, vocab, BLOCK)):
            distance, inside = _distances(logits + row * stride, block * BLOCK + lane, vocab, most, temperature)
            weight = tl.where(inside, tl.where(top_k < vocab, 1.0, tl.exp(-distance)), 0.0)
            a += tl.where(distance <= PIVOTS[0], weight, 0.0)
            b += tl.where(distance <= PIVOTS[1], weight, 0.0)
            c += tl.where(distance <= PIVOTS[2], weight, 0.0)
            d += tl.where(distance <= PIVOTS[3], weight, 0.0)
            e += tl.where(distance <= PIVOTS[4], weight, 0.0)
            f += tl.where(distance <= PIVOTS[5], weight, 0.0)
            g += tl.where(distance <= PIVOTS[6], weight, 0.0)
            h += tl.where(distance <= PIVOTS[7], weight, 0.0)
            total += tl.where(distance <= floor, weight, 0.0)
        measured += (row * parts + part) * _MEASURES
        tl.store(measured, tl.sum(a, 0))
        tl.store(measured + 1, tl.sum(b, 0))
        tl.store(measured + 2, tl.sum(c, 0))
        tl.store(measured + 3, tl.sum(d, 0))
        tl.store(measured + 4, tl.sum(e, 0))
        tl.store(measured + 5, tl.sum(f, 0))
        tl.store(measured + 6, tl.sum(g, 0))
        tl.store(measured + 7, tl.sum(h, 0))
        tl.store(measured + 8, tl.sum(total, 0))


@_kernel
def _gather(
    logits,
    table,
    slots,
    largest,
    measured,
    found,
    distances,
    tokens,
    counts,
    stride,
    vocab,
    span,
    parts,
    PIVOTS: tl.constexpr,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, floor, top_k, top_p = _limits(table, tl.load(slots + row))
    if (temperature > 0) & ((top_k < vocab) | (top_p < 1)):
        goal = top_k.to(tl.float32)
        if top_k >= vocab:
            goal = top_p * _measured(measured, row, parts, 8, PARTS) * _SLACK
        # The first pivot that includes all candidates within the limits, and the pivot before it.
        end, before = float("inf"), 0.0
        for i in tl.static_range(len(PIVOTS)):
            enough = (_measured(measured, row, parts, i, PARTS) >= goal) | (PIVOTS[i] >= floor)
            end = tl.where(enough, tl.minimum(end, tl.minimum(PIVOTS[i], floor)), end)
            before = tl.where(enough, before, tl.maximum(before, PIVOTS[i]))
        if part == 0:
            tl.store(found + row * 2, end)
            tl.store(found + row * 2 + 1, before)
        if end < float("inf"):
            most = _most(largest, row, parts, PARTS)
            lane = tl.arange(0, BLOCK)
            for block in range(part * span, _end(part, span, vocab, BLOCK)):
                token = block * BLOCK + lane
                distance, inside = _distances(logits + row * stride, token, vocab, most, temperature)
                kept = inside & (distance <= end)
                number = tl.sum(kept.to(tl.int32), 0)
                if number > 0:
                    place = tl.atomic_add(counts + row, number, sem="relaxed") + tl.cumsum(kept.to(tl.int32), 0) - 1
                    kept = kept & (place < GATHERED)
                    tl.store(distances + row * GATHERED + place, distance, kept)
                    tl.store(tokens + row * GATHERED + place, token, kept)


@_kernel
def _choose(
    logits,
    table,
    slots,
    lengths,
    prompt_lengths,
    largest,
    greedy,
    scores,
    drawn,
    measured,
    found,
    distances,
    tokens,
    counts,
    out,
    stride,
    vocab,
    span,
    parts,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature, floor, top_k, top_p = _limits(table, slot)
    part = tl.arange(0, PARTS)
    tops = tl.load(largest + row * parts + part, part < parts, -float("inf"))
    most = tl.max(tops, 0)
    token = tl.min(
        tl.where((tops == most) & (part < parts), tl.load(greedy + row * parts + part, part < parts, 0), vocab - 1), 0
    )
    finite = tl.abs(most) < float("inf")
    if (temperature > 0) & finite:
        chosen = -1
        if (top_k >= vocab) & (top_p >= 1):
            score = tl.load(scores + row * parts + part, part < parts, -float("inf"))
            its = tl.load(drawn + row * parts + part, part < parts, -1)
            chosen = tl.min(tl.where((score == tl.max(score, 0)) & (its >= 0), its, vocab), 0)
        else:
            key = _key(table, slot, lengths, prompt_lengths, row)
            end, before, count = tl.load(found + row * 2), tl.load(found + row * 2 + 1), tl.load(counts + row)
            total = _measured(measured, row, parts, 8, PARTS)
            if (end < float("inf")) & (count <= GATHERED):
                at = tl.arange(0, GATHERED)
                distance = tl.load(distances + row * GATHERED + at, at < count, float("inf"))
                its = tl.load(tokens + row * GATHERED + at, at < count, 0)
                limit = _limit_gathered(distance, at < count, end, before, top_k, top_p, total, vocab)
                score = tl.where(
                    (at < count) & (distance <= limit), _gumbel(_noise_bits(key, its)) - distance, -float("inf")
                )
                chosen = tl.min(tl.where((score == tl.max(score, 0)) & (at < count), its, vocab), 0)
            else:
                logits += row * stride
                limit = _limit_in_row(
                    logits, vocab, most, temperature, tl.minimum(floor, end), before, top_k, top_p, total, BLOCK
                )
                _, chosen = _drawn(logits, 0, tl.cdiv(vocab, BLOCK), vocab, most, temperature, limit, key, BLOCK)
        if (chosen >= 0) & (chosen < vocab):
            token = chosen
    tl.store(out + row, tl.where(finite, token, tl.where(most < 0, _NO_TOKEN, _NOT_FINITE)))


@triton.jit
def _limit_gathered(distance, inside, end, before, top_k, top_p, total, vocab):
    """Return the largest distance within the limits among the gathered candidates.

    The gathered candidates are all within `end`; the first limit is beyond `before`, or at `end`.
    """
    bits = distance.to(tl.int32, bitcast=True)
    low, high = before.to(tl.int32, bitcast=True), end.to(tl.int32, bitcast=True)
    weight = tl.where(inside, tl.exp(-distance) * _UNIT, 0.0).to(tl.int64)
    weight_of_all = (total.to(tl.float64) * _UNIT).to(tl.int64)
    if top_k < vocab:
        high = _smallest(bits, inside.to(tl.int64), top_k.to(tl.int64), low, high)
        low = high * 0
        weight_of_all = tl.sum(tl.where(bits <= high, weight, 0), 0)
    if top_p < 1:
        goal = (weight_of_all.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        high = _smallest(bits, weight, tl.maximum(goal, 1), low, high)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _smallest(bits, measure, goal, low, high):
    """Return the smallest t from `low` to `high` for which the measures of bits <= t reach the
    goal; `high` if there is none.
    """
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(bits <= middle, measure, 0), 0) >= goal
        low = tl.where(reached, low, middle + 1)
        high = tl.where(reached, middle, high)
    return high


@triton.jit
def _limit_in_row(logits, vocab, most, temperature, end, before, top_k, top_p, total, BLOCK: tl.constexpr):
    """Like `_limit_gathered`, for a whole row; its first limit is between `before` and `end`."""
    low, high = before.to(tl.int32, bitcast=True), end.to(tl.int32, bitcast=True)
    if top_k < vocab:
        high = _smallest_in_row(logits, vocab, most, temperature, True, top_k.to(tl.float32), low, high, BLOCK)
        low = high * 0
        total, _, _ = _measure_in_row(logits, vocab, most, temperature, False, high, BLOCK)
    if top_p < 1:
        high = _smallest_in_row(logits, vocab, most, temperature, False, top_p * total, low, high, BLOCK)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _smallest_in_row(logits, vocab, most, temperature, counting, goal, low, high, BLOCK: tl.constexpr):
    """Like `_smallest`, for a whole row.

    The ends move to existing distances, since each step reads the whole row and few logits in 16
    bits differ.
    """
    while low < high:
        middle = low + (high - low) // 2
        measured, below, above = _measure_in_row(logits, vocab, most, temperature, counting, middle, BLOCK)
        reached = measured >= goal
        high, low = tl.where(reached, tl.maximum(low, below), high), tl.where(reached, low, tl.minimum(above, high))
    return high


@triton.jit
def _measure_in_row(logits, vocab, most, temperature, counting, limit, BLOCK: tl.constexpr):
    """Return the number or the weight of the candidates within the limit, the bits of the last
    candidate within it, and those of the first beyond it.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    below, above = tl.full([BLOCK], -1, tl.int32), tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for block in range(tl.cdiv(vocab, BLOCK)):
        distance, inside = _distances(logits, block * BLOCK + lane, vocab, most, temperature)
        bits = distance.to(tl.int32, bitcast=True)
        within, beyond = inside & (bits <= limit), inside & (bits > limit)
        total += tl.where(within, tl.where(counting, 1.0, tl.exp(-distance)), 0.0)
        below = tl.maximum(below, tl.where(within, bits, -1))
        above = tl.minimum(above, tl.where(beyond, bits, 0x7FFFFFFF))
    return tl.sum(total, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _drawn(logits, first, last, vocab, most, temperature, limit, key, BLOCK: tl.constexpr):
    """Return score and token of the winner within the limit in a row's blocks `first` to `last` -
    1; the token is -1 if there is none.
    """
    lane = tl.arange(0, BLOCK)
    # The row's largest logit has a score of at least -log(-log1p(2^-24 - 1)), which is -2.8.
    best, chosen = -2.9, -1
    for block in range(first, last):
        token = block * BLOCK + lane
        distance, inside = _distances(logits, token, vocab, most, temperature)
        inside = inside & (distance <= limit)
        if tl.min(tl.where(inside, distance, float("inf")), 0) + best < _MOST_NOISE:
            bits = _noise_bits(key, token)
            # A few more than necessary, since float32 has rounded bits and scores.
            near = inside & (bits.to(tl.float32) <= tl.exp(-(best + distance)) * (2.0**32 * 1.0001) + 2.0)
            if tl.max(near.to(tl.int32), 0) > 0:
                score = tl.where(near, _gumbel(bits) - distance, -float("inf"))
                top = tl.max(score, 0)
                if top > best:
                    chosen = tl.min(tl.where(score == top, token, vocab), 0)
                    best = top
    return best, chosen


@triton.jit
def _distances(logits, token, vocab, most, temperature):
    """Return each token's distance from the row's largest logit, and whether it is valid: a number,
    for a token of the row.
    """
    logit = tl.load(logits + token, token < vocab, -float("inf")).to(tl.float32)
    distance = tl.div_rn(most - logit, temperature)
    return distance, (token < vocab) & (distance >= 0)


@triton.jit
def _end(part, span, vocab, BLOCK: tl.constexpr):
    """Return the block after a part's last block."""
    return tl.minimum((part + 1) * span, tl.cdiv(vocab, BLOCK))


@triton.jit
def _most(largest, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(largest + row * parts + part, part < parts, -float("inf")), 0)


@triton.jit
def _measured(measured, row, parts, which, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(measured + (row * parts + part) * _MEASURES + which, part < parts, 0.0), 0)


@triton.jit
def _limits(table, slot):
    """Return temperature, the floor's distance, top_k and top_p."""
    words = table + slot.to(tl.int64) * _WORDS
    temperature = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
    floor = tl.load(words + _FLOOR).to(tl.float32, bitcast=True)
    return temperature, floor, tl.load(words + _TOP_K), tl.load(words + _TOP_P).to(tl.float32, bitcast=True)


@triton.jit
def _key(table, slot, lengths, prompt_lengths, row):
    """Return the key of a row's next token."""
    index = tl.load(lengths + row)
    if prompt_lengths is not None:
        index -= tl.load(prompt_lengths + slot)
    words = table + slot.to(tl.int64) * _WORDS
    key = _mix(_unsigned(words + _SEED) + _GOLDEN)
    key = _mix(key + _unsigned(words + _CHOICE) * _GOLDEN)
    return _mix(key + index.to(tl.int64).to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def _unsigned(words):
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    return low | (tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def _mix(z):
    z = _mixed_up(z)
    return z ^ (z >> 31)


@triton.jit
def _mixed_up(z):
    """Compute `_mix` without its last step."""
    z = (z ^ (z >> 30)) * _MIX_1
    return (z ^ (z >> 27)) * _MIX_2


@triton.jit
def _noise_bits(key, token):
    high = (_mixed_up(key + (token + 1).to(tl.uint64) * _GOLDEN) >> 32).to(tl.uint32)
    return high ^ (high >> 31)


@triton.jit
def _gumbel(bits):
    v = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    # log1p(-v) as Kahan has it (HP-15C Advanced Functions Handbook, 1982): the rounding of 1 - v
    # cancels.
    u = 1.0 - v
    rest = tl.where(u == 1.0, v, tl.log(u) * v / (u - 1.0))
    return -tl.log(rest)
