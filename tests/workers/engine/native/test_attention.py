"""Paged attention by the CPU kernels against the plain formula in double precision, in a cache that
is NaN but for the rows' own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.layers.head_norms import KINDS, head_norms
from tests.workers.engine.native.available import needs_native
from workers.engine.attention.base import Attention, AttentionMetadata, CacheShape
from workers.engine.backends.registry import find_backend
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.rotary import Rotary
from workers.engine.native.attention import CpuAttention

pytestmark = needs_native

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


class Numbers(NamedTuple):
    """The dtype of queries, keys and values, and of the cache."""

    dtype: torch.dtype
    cache: torch.dtype


BFLOAT16, FLOAT32 = Numbers(torch.bfloat16, torch.bfloat16), Numbers(torch.float32, torch.float32)
each_kind = pytest.mark.parametrize(
    "numbers",
    [BFLOAT16, FLOAT32, Numbers(torch.float32, torch.bfloat16)],
    ids=["bfloat16", "float32", "float32-over-bfloat16"],
)
CAUSAL = AttentionPattern()
Rows = list[tuple[int, int]]  # tokens of this step, context

DECODE: Rows = [(1, 1), (1, 16), (1, 17), (1, 255), (1, 256), (1, 257), (1, 700)]
MIXED: Rows = [(1, 31), (7, 7), (40, 40), (3, 190), (1, 600), (33, 100), (5, 513)]
TEXTS: Rows = [(length, length) for length in (1, 2, 7, 16, 31, 64, 130, 257)]
LONG: Rows = [(1, 2100), (130, 2100), (2, 1025)]


@dataclass
class NativeStep:
    """Rows with random tensors, whose earlier tokens are in the cache, in blocks handed out in
    random order.
    """

    rows: Rows
    kv_heads: int = 2
    group: int = 1
    dim: int = 64
    block_size: int = 16
    numbers: Numbers = BFLOAT16
    pattern: AttentionPattern = CAUSAL
    seed: int = 3
    reach: int | None = None  # of a bias
    soft_cap: float | None = None
    with_sinks: bool = False

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        random = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        blocks = [-(-context // self.block_size) for _, context in self.rows]
        self.shape = CacheShape(sum(blocks) + 2, self.block_size, self.kv_heads, self.dim, self.numbers.cache)
        free = iter(random.permutation(np.arange(1, self.shape.num_blocks - 1)))
        self.tables = np.full(
            (len(self.rows), max(blocks) + 1), self.shape.num_blocks - 1, np.int32
        )  # the last block is free
        for row, number in enumerate(blocks):
            self.tables[row, :number] = [next(free) for _ in range(number)]
        heads = self.kv_heads * self.group
        self.bias = None if self.reach is None else torch.randn(heads, 2 * self.reach + 1)
        self.sinks = torch.randn(heads) * 2 if self.with_sinks else None
        self.q = [self._random(count, self.kv_heads * self.group) for count, _ in self.rows]
        self.keys = [self._random(context, self.kv_heads, self.numbers.cache) for _, context in self.rows]
        self.values = [self._random(context, self.kv_heads, self.numbers.cache) for _, context in self.rows]

    def _random(self, tokens: int, heads: int, rounded: torch.dtype = torch.float32) -> Tensor:
        """Numbers that the cache has as they are, where they are rounded to its dtype."""
        return torch.randn(tokens, heads, self.dim).to(rounded).to(self.numbers.dtype)

    def attention(self) -> Attention:
        return find_backend("cpu").attention(self.shape, self.kv_heads * self.group, self.numbers.dtype, CPU)

    def layer(self) -> AttentionShape:
        heads, scale = self.kv_heads * self.group, self.dim**-0.5
        return AttentionShape(heads, self.kv_heads, self.dim, scale, self.pattern, soft_cap=self.soft_cap)

    def metadata(self, spans: list[tuple[int, int, int]]) -> AttentionMetadata:
        """For spans (row, first, last) of tokens computed together."""
        size = self.block_size
        slots = [
            int(self.tables[row, position // size]) * size + position % size
            for row, a, b in spans
            for position in range(a, b)
        ]
        starts = np.cumsum([0] + [b - a for _, a, b in spans]).astype(np.int32)
        contexts = np.array([b for _, _, b in spans], np.int32)
        return AttentionMetadata(
            torch.tensor(slots, dtype=torch.int64), starts, contexts, self.tables[[row for row, _, _ in spans]]
        )

    def attended(self, threads: int = 1, only: int | None = None) -> list[Tensor]:
        """What comes of each row, or of one alone."""
        torch.set_num_threads(threads)
        attention = self.attention()
        cache = attention.new_cache(1)[0].fill_(float("nan"))
        chosen = [(row, *self.rows[row]) for row in range(len(self.rows)) if only in (None, row)]
        earlier = [(row, 0, context - count) for row, count, context in chosen if context > count]
        now = [(row, context - count, context) for row, count, context in chosen]
        left = [page for row, count, context in chosen for page in self.left(row, context - count)]
        for spans in filter(None, (earlier, now)):
            q = (
                torch.cat([self.q[row] for row, _, _ in spans])
                if spans is now
                else self._random(sum(b for _, _, b in spans), len(self.q[0][0]))
            )
            k, v = (torch.cat([of[row][a:b] for row, a, b in spans]) for of in (self.keys, self.values))
            if spans is now:
                cache[left] = torch.nan
            out = attention.forward(q, k, v, cache, self.metadata(spans), self.layer(), self.sinks, self.bias)
        return list(out.split([b - a for _, a, b in now]))

    def left(self, row: int, start: int) -> list[int]:
        """Return the blocks before the window of the token at `start`."""
        before = self.pattern.before
        number = 0 if before is None else max(0, start - before) // self.block_size
        return [int(block) for block in self.tables[row, :number]]

    def expected(self, row: int) -> Tensor:
        count, context = self.rows[row]
        keys, values = (of[row].double().repeat_interleave(self.group, 1) for of in (self.keys, self.values))
        queries, pattern = torch.arange(context - count, context)[:, None], self.pattern
        ahead = torch.arange(context) - queries
        seen = (-ahead <= (context if pattern.before is None else pattern.before)) & (
            ahead <= (context if pattern.after is None else pattern.after)
        )
        if pattern.chunk is not None:
            seen &= torch.arange(context) // pattern.chunk == queries // pattern.chunk
        scores = torch.einsum("qhd,khd->hqk", self.q[row].double(), keys) * self.dim**-0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        if self.bias is not None and self.reach is not None:
            scores += self.bias[:, ahead.clamp(-self.reach, self.reach) + self.reach]
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, count, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :context], values)

    def check(self) -> None:
        for row, got in enumerate(self.attended()):
            assert (got.double() - self.expected(row)).abs().max() < TOLERANCE[self.numbers.dtype], (
                self.rows[row],
                self,
            )


@each_kind
@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"pattern": AttentionPattern(window=5)},
        {"pattern": AttentionPattern(window=100), "with_sinks": True},
        {"pattern": AttentionPattern(chunk=24)},
        {"pattern": AttentionPattern(chunk=300), "soft_cap": 1.2, "with_sinks": True},
        {"soft_cap": 50.0},
    ],
    ids=["all", "window", "window-and-sinks", "chunk", "chunk-cap-and-sinks", "cap"],
)
@pytest.mark.parametrize(
    ("dim", "group", "block_size"), [(64, 1, 16), (64, 3, 32), (80, 4, 16), (128, 8, 8), (12, 2, 7), (17, 1, 16)]
)
def test_mixed_rows(dim: int, group: int, block_size: int, scores: dict[str, Any], numbers: Numbers) -> None:
    NativeStep(DECODE + MIXED, 2, group, dim, block_size, numbers, **scores).check()


@each_kind
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("dim", "group", "block_size"), [(64, 1, 16), (80, 4, 16), (128, 8, 8), (17, 1, 16)])
def test_whole_texts_seen_to_both_sides(
    dim: int, group: int, block_size: int, window: int | None, numbers: Numbers
) -> None:
    pattern = AttentionPattern(False, window)
    NativeStep(TEXTS, 2, group, dim, block_size, numbers, pattern).check()
    limits: dict[str, Any] = {"soft_cap": 1.2, "with_sinks": True}
    NativeStep(TEXTS, 2, group, dim, block_size, numbers, pattern, reach=20, **limits).check()


@each_kind
def test_a_bias_on_rows_of_few_tokens_that_see_what_is_before(numbers: Numbers) -> None:
    NativeStep(DECODE + MIXED, 2, 3, numbers=numbers, reach=40).check()


@each_kind
def test_more_queries_to_a_head_than_a_tile_has(numbers: Numbers) -> None:
    NativeStep(MIXED, 1, 40, 64, numbers=numbers).check()


@pytest.mark.proof
@pytest.mark.timeout(900)
@each_kind
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 8), (4, 32), (8, 16)])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_every_shape(dim: int, group: int, block_size: int, numbers: Numbers) -> None:
    for seed, window in enumerate([None, 1, 7, 16, 33, 300]):
        kind, rows = seed + dim // 16 + group, DECODE + MIXED + LONG
        limits: dict[str, Any] = {"soft_cap": (None, 1.2, 30.0)[kind % 3], "with_sinks": kind % 2 == 0}
        for pattern in (AttentionPattern(window=window), AttentionPattern(chunk=window)):
            NativeStep(rows, 2, group, dim, block_size, numbers, pattern, seed, **limits).check()
        texts = [(context, context) for _, context in DECODE + MIXED]
        rows = (texts, MIXED + LONG)[kind % 2]
        reach = (None, 9, 3000)[seed % 3]  # of a bias
        NativeStep(
            rows, 2, group, dim, block_size, numbers, AttentionPattern(False, window), seed, reach, **limits
        ).check()


@each_kind
@pytest.mark.parametrize("limits", [{}, {"soft_cap": 1.2, "with_sinks": True}], ids=["plain", "cap-and-sinks"])
@pytest.mark.parametrize(
    "pattern",
    [
        *(AttentionPattern(causal, window) for causal in (True, False) for window in (None, 40)),
        AttentionPattern(chunk=90),
    ],
    ids=["before", "window", "all", "both-sides", "chunk"],
)
def test_a_row_is_the_same_in_any_batch_on_any_number_of_threads(
    pattern: AttentionPattern, limits: dict[str, Any], numbers: Numbers
) -> None:
    step = NativeStep(DECODE + MIXED, 2, 3, pattern=pattern, numbers=numbers, **limits)
    together = step.attended(threads=1)
    for threads in (2, 3):
        assert all(map(torch.equal, step.attended(threads), together))
    for row, expected in enumerate(together):
        assert torch.equal(step.attended(only=row)[0], expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 40])  # queries of the row that reads: few, and a prefill
@pytest.mark.parametrize("before", [0, 33])  # blocks, of which 32 make a segment of keys and more
@pytest.mark.parametrize("block_size", [16, 8])
@each_kind
def test_a_row_sees_the_block_that_another_fills_in_the_same_step(
    numbers: Numbers, block_size: int, before: int, count: int, threads: int
) -> None:
    shared = (before + 1) * block_size
    step = NativeStep([(count, shared + count), (1, shared)], 2, 3, numbers=numbers, block_size=block_size)
    step.tables[0, : before + 1] = step.tables[1, : before + 1]
    for of in (step.keys, step.values):
        of[0][:shared] = of[1]
    torch.set_num_threads(threads)
    attention = step.attention()
    cache = attention.new_cache(1)[0].fill_(float("nan"))
    earlier = torch.zeros(shared - 1, 6, 64, dtype=numbers.dtype)
    for spans, q in (
        ([(1, 0, shared - 1)], earlier),
        ([(0, shared, shared + count), (1, shared - 1, shared)], torch.cat(step.q)),
    ):
        k, v = (torch.cat([of[row][a:b] for row, a, b in spans]) for of in (step.keys, step.values))
        out = attention.forward(q, k, v, cache, step.metadata(spans), step.layer())
    for row, got in enumerate(out.split([count, 1])):
        assert (got.double() - step.expected(row)).abs().max() < TOLERANCE[numbers.dtype]


def written_ahead(rows: Rows, shared: dict[tuple[int, int], int]) -> list[int]:
    """Which rows are, where row `a` has the first `n` blocks of row `b` by shared {(a, b): n}, and
    whether any are.
    """
    step = NativeStep(rows, 2, 3)
    for (a, b), number in shared.items():
        step.tables[a, :number] = step.tables[b, :number]
    metadata = step.metadata([(row, context - count, context) for row, (count, context) in enumerate(rows)])
    attention = step.attention()
    assert isinstance(attention, CpuAttention)
    plan = attention.prepared(metadata, CAUSAL, None, 10 * 64).step
    return [*(ctypes.c_int32 * len(rows)).from_address(plan.ahead), plan.any_ahead]


def test_only_what_others_see_in_the_same_step_is_written_ahead() -> None:
    assert written_ahead([(1, 16), (1, 32), (2, 33), (1, 5)], {}) == [0, 0, 0, 0, 0]
    assert written_ahead([(1, 16), (1, 32), (3, 40)], {}) == [0, 0, 1, 1]  # nine queries to a head
    assert written_ahead([(2, 34), (1, 32), (1, 16)], {(0, 1): 2}) == [0, 1, 0, 1]
    assert written_ahead([(2, 34), (2, 33), (1, 16)], {(0, 1): 2}) == [0, 1, 0, 1]
    assert written_ahead([(1, 34), (1, 33)], {(0, 1): 2}) == [0, 0, 0]  # filled before
    # What they share was filled before
    assert written_ahead([(1, 32), (1, 32)], {(0, 1): 1}) == [0, 0, 0]


@pytest.mark.parametrize(
    "scores",
    [
        {"pattern": AttentionPattern(window=50)},
        {"pattern": AttentionPattern(chunk=70)},
        {"soft_cap": 1.2, "with_sinks": True},
    ],
    ids=["window", "chunk", "cap-and-sinks"],
)
def test_the_parts_of_a_prompt_are_what_the_whole_is(scores: dict[str, Any]) -> None:
    whole = NativeStep([(300, 300)], 2, 3, **scores)
    expected = whole.attended()[0]
    part = NativeStep([(170, 300)], 2, 3, **scores)
    part.keys, part.values, part.q, part.sinks = whole.keys, whole.values, [whole.q[0][130:]], whole.sinks
    assert torch.equal(part.attended()[0], expected[130:])


@pytest.mark.parametrize("sinks", [None, torch.tensor([-200.0, -200.0])], ids=["no-sinks", "sinks"])
def test_a_row_without_context_gets_zeros(sinks: Tensor | None) -> None:
    step = NativeStep([(1, 20), (1, 9)])
    attention = step.attention()
    cache = attention.new_cache(1)[0]
    metadata = AttentionMetadata(
        torch.tensor([16, 0]), np.array([0, 1, 2], np.int32), np.array([1, 0], np.int32), np.array([[1], [0]], np.int32)
    )
    tensors = torch.full((3, 2, 2, 64), 2.0, dtype=torch.bfloat16)
    out = attention.forward(*tensors, cache, metadata, step.layer(), sinks)
    assert torch.equal(out[0], torch.full((2, 64), 2.0, dtype=torch.bfloat16))
    assert not out[1].any()


def test_tensors_come_in_any_order_of_tokens_and_heads() -> None:
    step = NativeStep([(40, 40), (1, 1)], 2, 2)
    q, k, v = torch.cat(step.q), torch.cat(step.keys), torch.cat(step.values)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    fused = list(torch.cat((q, k, v), 1).split((4, 2, 2), 1))
    outs = []
    for tensors in ([q, k, v], by_head, fused):
        attention = step.attention()
        metadata = step.metadata([(0, 0, 40), (1, 0, 1)])
        outs.append(attention.forward(*tensors, attention.new_cache(1)[0], metadata, step.layer()))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("norms", KINDS)
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (128, 32), (20, 8)])
@each_kind
def test_norm_and_rotation(numbers: Numbers, dim: int, block_size: int, norms: str) -> None:
    """As the reference does them, which rounds bfloat16 at every operation."""
    dtype = numbers.dtype
    step = NativeStep([(37, 37), (1, 1), (20, 20)], 2, 3, dim, block_size, numbers)
    torch.manual_seed(5)
    positions = torch.cat([torch.arange(count) for count, _ in step.rows])
    cos, sin = Rotary(RopeConfig(10000.0, "default", {}, 4096), dim, 100, dtype, CPU).cos_sin(positions, positions + 1)
    rotary = RotaryHeads(cos, sin, *head_norms(norms, 6, 2, dim, dtype, CPU), norms == "after rotation")
    qkv = torch.randn(len(positions), 10, dim).to(dtype)
    spans = [(row, 0, count) for row, (count, _) in enumerate(step.rows)]
    outs = []
    for backend in ("cpu", "torch"):
        attention = find_backend(backend).attention(step.shape, 6, dtype, CPU)
        cache = attention.new_cache(1)[0]
        out = attention.forward_rotary(qkv, rotary, cache, step.metadata(spans), step.layer())
        outs.append(out.float())
    assert (outs[0] - outs[1]).abs().max() < (1e-5 if numbers == FLOAT32 else 6e-2)


def test_the_cache_is_as_large_as_planned() -> None:
    shape = CacheShape(5, 16, 2, 64)
    cache = find_backend("cpu").attention(shape, 2, torch.bfloat16, CPU).new_cache(3)
    assert [layer.nbytes for layer in cache] == [5 * shape.block_bytes(torch.bfloat16)] * 3
    assert not any(layer.any() for layer in cache)
