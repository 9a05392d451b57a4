"""Paged attention by Triton against the plain formula, in memory where whatever is not the rows'
own is no number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from workers.engine.attention.base import CacheShape, DeviceMetadata
from workers.engine.backends.registry import find_backend
from workers.engine.kernels import paged_attention as backend
from workers.engine.kernels.tile_choices import _choices, choices
from workers.engine.kernels.tuning import candidates
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.messages.errors import ModelLoadError

TOLERANCE = {torch.float32: 1e-5 if DEVICE.type == "cpu" else 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CAUSAL = AttentionPattern()
Rows = list[tuple[int, int]]  # tokens of this step, context

DECODE: Rows = [(1, 5), (1, 64), (1, 190), (1, 0), (1, 1), (1, 65)]
TEXTS: Rows = [(5, 5), (1, 1), (130, 130), (64, 64)]
MIXED: Rows = [(1, 5), (7, 70), (40, 40), (3, 190), (1, 0), (1, 130)]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """What torch.empty gives is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few tiles are cut already, however many rows there are."""
    monkeypatch.setattr(backend, "_LONG", 64)
    monkeypatch.setattr(backend, "_MIN_PIECE", 64)
    monkeypatch.setattr(backend, "_WAVES", {"decode": 16, "prefill": 16})


@dataclass
class KernelStep:
    """Rows whose earlier tokens are in the cache, in blocks handed out in random order, with random
    tensors and a random seed.
    """

    rows: Rows
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pattern: AttentionPattern = CAUSAL
    reach: int | None = None  # of a bias
    seed: int = field(default_factory=lambda: int(os.environ.get("ATTENTION_SEED", 1)))
    cache_dtype: torch.dtype | None = None  # where it is another one
    soft_cap: float | None = None
    with_sinks: bool = False

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        self.random = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        blocks = [-(-context // self.block_size) for _, context in self.rows]
        self.shape = CacheShape(sum(blocks) + 2, self.block_size, self.kv_heads, self.dim, self.cache_dtype)
        free = iter(self.random.permutation(np.arange(1, self.shape.num_blocks - 1)))
        self.tables = np.full((len(self.rows) + 3, max(*blocks, 1) + 2), self.shape.num_blocks - 1, np.int32)
        self.slots = self.random.permutation(np.arange(1, len(self.rows) + 1)).astype(np.int32)
        for row, number in enumerate(blocks):
            self.tables[self.slots[row], :number] = [next(free) for _ in range(number)]
            self.slots[row] *= number > 0
        heads = self.kv_heads * self.group
        self.bias = None if self.reach is None else torch.randn(heads, 2 * self.reach + 1, device=DEVICE)
        self.sinks = torch.randn(heads, device=DEVICE) * 2 if self.with_sinks else None
        self.q = self._random(sum(count for count, _ in self.rows), self.kv_heads * self.group)
        self.keys = [self._kept(max(count, context)) for count, context in self.rows]
        self.values = [self._kept(max(count, context)) for count, context in self.rows]

    def _random(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.dim, device=DEVICE).to(self.dtype)

    def _kept(self, tokens: int) -> Tensor:
        """Numbers that the cache holds exactly, since the interpreter rounds to 8 bits wrongly."""
        return self._random(tokens, self.kv_heads).to(self.shape.dtype or self.dtype).to(self.dtype)

    def new(self, tensors: list[Tensor]) -> Tensor:
        """Of every row what this step computes."""
        return torch.cat(
            [tensor[tensor.shape[0] - count :] for tensor, (count, _) in zip(tensors, self.rows, strict=True)]
        )

    def cache(self) -> Tensor:
        """NaN but for the rows' earlier tokens, in blocks that the window has not left."""
        s = self.shape
        cache = torch.full(
            (2, s.num_blocks, s.kv_heads, s.block_size, s.head_dim), float("nan"), dtype=self.dtype, device=DEVICE
        ).to(self.cache_dtype or self.dtype)
        for row, (count, context) in enumerate(self.rows):
            start, before = context - count, self.pattern.before
            first = 0 if before is None else max(0, start - before) // s.block_size * s.block_size
            places = self._places(row, first, start)
            for half, tensors in enumerate((self.keys, self.values)):
                earlier = tensors[row][first : max(start, first)].to(cache.dtype)
                cache[half, places // s.block_size, :, places % s.block_size] = earlier
        return cache

    def _places(self, row: int, first: int, last: int) -> Tensor:
        position = np.arange(first, last)
        blocks = self.tables[self.slots[row], position // self.block_size] if last > 0 else position
        return torch.from_numpy((blocks * np.int64(self.block_size) + position % self.block_size).astype(np.int64)).to(
            DEVICE
        )

    def metadata(self) -> DeviceMetadata:
        spans = [
            (row, context - count if context else 0, context or count) for row, (count, context) in enumerate(self.rows)
        ]
        slots = torch.cat(
            [
                self._places(*span) if self.rows[span[0]][1] else self._places(span[0], 0, 0).new_zeros(1)
                for span in spans
            ]
        )
        starts = np.cumsum([0] + [count for count, _ in self.rows]).astype(np.int32)
        contexts = np.array([context for _, context in self.rows], np.int32)
        on_device = [torch.from_numpy(array).to(DEVICE) for array in (starts, contexts, self.slots, self.tables)]
        return DeviceMetadata(slots, *on_device, max(count for count, _ in self.rows), int(contexts.max()))

    def layer(self) -> AttentionShape:
        heads, scale = self.kv_heads * self.group, self.dim**-0.5
        return AttentionShape(heads, self.kv_heads, self.dim, scale, self.pattern, soft_cap=self.soft_cap)

    def attended(self) -> Tensor:
        attention = find_backend("triton").attention(self.shape, self.kv_heads * self.group, self.dtype, DEVICE)
        k, v = self.new(self.keys), self.new(self.values)
        return attention.forward(self.q, k, v, self.cache(), self.metadata(), self.layer(), self.sinks, self.bias)

    def expected(self) -> Tensor:
        parts = []
        for (count, context), q, keys, values in zip(
            self.rows, self.q.split([count for count, _ in self.rows]), self.keys, self.values, strict=True
        ):
            if context == 0:
                parts.append(torch.zeros_like(q, dtype=torch.float32))
                continue
            position = torch.arange(context - count, context, device=DEVICE)[:, None]
            ahead, pattern = torch.arange(context, device=DEVICE) - position, self.pattern
            seen = (-ahead <= (context if pattern.before is None else pattern.before)) & (
                ahead <= (context if pattern.after is None else pattern.after)
            )
            if pattern.chunk is not None:
                seen &= torch.arange(context, device=DEVICE) // pattern.chunk == position // pattern.chunk
            scores = (
                torch.einsum("nhd,lhd->hnl", q.float(), keys.float().repeat_interleave(self.group, 1)) * self.dim**-0.5
            )
            if self.soft_cap is not None:
                scores = self.soft_cap * (scores / self.soft_cap).tanh()
            if self.bias is not None and self.reach is not None:
                scores += self.bias[:, ahead.clamp(-self.reach, self.reach) + self.reach]
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[:, None, None].expand(-1, count, 1)), -1)
            weights = scores.softmax(-1)[..., :context]
            parts.append(torch.einsum("hnl,lhd->nhd", weights, values.float().repeat_interleave(self.group, 1)))
        return torch.cat(parts)

    def check(self) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(self.attended().float(), self.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "shape",
    [
        {"group": 2, "dtype": torch.bfloat16},
        {"group": 7, "dim": 80, "block_size": 32, "kv_heads": 1},
        {"group": 1, "dim": 128, "block_size": 8, "pattern": AttentionPattern(window=50)},
        {"group": 1, "block_size": 32, "pattern": AttentionPattern(window=3)},  # whose block is not full
        {"group": 2, "dim": 80, "dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn},
        {"group": 3, "pattern": AttentionPattern(chunk=50)},
        {"group": 3, "kv_heads": 1, "soft_cap": 1.2},
        {"group": 3, "with_sinks": True},
    ],
    ids=["group-2-bf16", "group-7-of-80", "window", "window-in-a-block", "fp8", "chunk", "cap", "sinks"],
)
def test_equals_the_formula(shape: dict[str, object], rows: Rows) -> None:
    KernelStep(rows, **shape).check()


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 2, "dtype": torch.bfloat16, "pattern": AttentionPattern(causal=False)},
        {"group": 1, "dim": 80, "block_size": 8, "pattern": AttentionPattern(False, 20), "reach": 9},
        {"group": 2, "pattern": AttentionPattern(False, 20), "reach": 9, "soft_cap": 1.2, "with_sinks": True},
    ],
    ids=["bf16", "window-and-bias", "cap-and-sinks"],
)
def test_whole_texts_seen_to_both_sides(shape: dict[str, object]) -> None:
    KernelStep(TEXTS, kv_heads=1, **shape).check()


@pytest.mark.proof
@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"pattern": AttentionPattern(window=90)},
        {"pattern": AttentionPattern(chunk=130)},
        {"soft_cap": 1.2, "with_sinks": True},
    ],
    ids=["all", "window", "chunk", "cap-and-sinks"],
)
def test_a_context_in_pieces(scores: dict[str, Any], rows: Rows) -> None:
    step = KernelStep(rows, kv_heads=1, group=4, **scores)
    step.check()
    metadata = step.metadata()
    attention = find_backend("triton").attention(step.shape, 4, step.dtype, DEVICE)
    pieces = attention._pieces(metadata, step.q.shape[0], step.pattern)  # type: ignore[attr-defined]
    assert (pieces.leaders >= 0).any()


@pytest.mark.proof
@pytest.mark.parametrize("contexts", [[20] * 19 + [4300], [1100] * 20], ids=["one-long", "alike"])
def test_of_many_rows_those_are_cut_that_are_long_beside_the_others(contexts: list[int]) -> None:
    """As in a graph, where the host knows no more than that a context may be long."""
    step = KernelStep([(1, context) for context in contexts], kv_heads=1, group=4, dim=16)
    metadata = step.metadata()
    metadata.max_context = 8192
    attention = find_backend("triton").attention(step.shape, 4, step.dtype, DEVICE)
    attention._parallel = 4  # type: ignore[attr-defined]
    pieces = attention._pieces(metadata, len(contexts), CAUSAL)  # type: ignore[attr-defined]
    whole = pieces.records[:, 7][pieces.records[:, 1] > 0] == 1
    assert whole.sum() == (19 if contexts[-1] > contexts[0] else 20)
    assert whole.all() == (contexts[-1] == contexts[0])
    k, v = step.new(step.keys), step.new(step.values)
    out = attention.forward(step.q, k, v, step.cache(), metadata, step.layer())
    torch.testing.assert_close(out, step.expected(), rtol=TOLERANCE[step.dtype], atol=TOLERANCE[step.dtype])


@pytest.mark.proof
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 32), (128, 8)])
@pytest.mark.parametrize("group", [1, 8])
def test_wide_grid(
    group: int, dim: int, block_size: int, window: int | None, split: bool, request: pytest.FixtureRequest
) -> None:
    if split:
        request.getfixturevalue("_short_pieces")
    for rows, dtype in ((DECODE, torch.float32), (MIXED, torch.bfloat16)):
        KernelStep(rows, 1, group, dim, block_size, dtype, AttentionPattern(window=window)).check()
    for rows, dtype, reach in ((TEXTS, torch.float32, 40), (MIXED, torch.bfloat16, None)):
        KernelStep(rows, 1, group, dim, block_size, dtype, AttentionPattern(False, window), reach).check()


def test_heads_are_normed_and_rotated_on_the_way() -> None:
    step = KernelStep(MIXED, dtype=torch.bfloat16)
    tokens = step.q.shape[0]
    angles = torch.rand(tokens, 1, step.dim // 2, device=DEVICE).repeat(1, 1, 2)
    sin = angles.sin() * torch.tensor([-1.0, 1.0], device=DEVICE).repeat_interleave(step.dim // 2)
    rotary = RotaryHeads(angles.cos().to(step.dtype), sin.to(step.dtype))
    qkv = torch.cat((step.q, step.new(step.keys), step.new(step.values)), 1)
    attention = find_backend("triton").attention(step.shape, 4, step.dtype, DEVICE)
    cache = step.cache()
    out = attention.forward_rotary(qkv, rotary, cache, step.metadata(), step.layer())
    turned = qkv[:, :6].float() * rotary.cos.float() + qkv[:, :6].float().roll(step.dim // 2, -1) * rotary.sin.float()
    step.q = turned[:, :4].to(step.dtype)
    new = turned[:, 4:].to(step.dtype).split([count for count, _ in step.rows])
    for keys, part in zip(step.keys, new, strict=True):
        keys[keys.shape[0] - part.shape[0] :] = part
    torch.testing.assert_close(out.float(), step.expected(), rtol=3e-2, atol=3e-2)


def test_without_a_gpu_the_interpreter_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelLoadError, match="the triton backend needs a GPU; on a CPU choose attention_backend torch"):
        find_backend("triton").check(torch.device("cpu"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"), [(8, 2, 128), (8, 4, 128), (2, 7, 64), (12, 1, 64), (4, 8, 96), (1, 16, 80)]
)
def test_real_shapes(kv_heads: int, group: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    limits: dict[str, Any] = {"soft_cap": 1.2, "with_sinks": True} if window else {}
    random = np.random.default_rng(1)
    decode = [(1, int(length)) for length in random.integers(1, 6000, 40)] + [(1, 0)] * 3
    chunks = [
        (int(count), int(count + before))
        for count, before in zip(random.integers(2, 900, 5), random.integers(0, 3000, 5), strict=True)
    ]
    for rows in (decode, [(1, 30000)], [(2048, 2048)], [(100, 20000)], decode + chunks):
        KernelStep(rows, kv_heads, group, dim, 16, dtype, AttentionPattern(window=window), **limits).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 2, 128), (2, 7, 64), (1, 16, 80)])
def test_real_shapes_over_a_cache_of_8_bits(kv_heads: int, group: int, dim: int) -> None:
    random = np.random.default_rng(1)
    decode = [(1, int(length)) for length in random.integers(1, 6000, 40)] + [(1, 0)] * 3
    for rows in (decode, [(1, 30000)], [(2048, 2048)], [*decode, (100, 2000)]):
        KernelStep(rows, kv_heads, group, dim, 16, torch.bfloat16, cache_dtype=torch.float8_e4m3fn).check()


@pytest.mark.gpu
def test_tiles_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = CacheShape(100, 16, 2, 64)
    _choices.cache_clear()
    chosen = choices(shape, 14, torch.bfloat16, DEVICE)
    assert all(chosen[kind] in candidates(kind, 64, 7, torch.bfloat16) for kind in ("decode", "prefill"))
    (kept,) = tmp_path.rglob("*.json")
    assert len(json.loads(kept.read_text())["choices"]) == 2
    _choices.cache_clear()
    assert choices(shape, 14, torch.bfloat16, DEVICE) == chosen


@pytest.mark.gpu
def test_a_recording_reads_the_lengths_in_memory() -> None:
    first = KernelStep([(1, length) for length in (3000, 17, 1, 0)], dtype=torch.bfloat16)
    metadata, cache = first.metadata(), first.cache()
    attention = find_backend("triton").attention(first.shape, 4, first.dtype, DEVICE)
    k, v = first.new(first.keys), first.new(first.values)
    attention.forward(first.q, k, v, cache, metadata, first.layer())  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.forward(first.q, k, v, cache, metadata, first.layer())
    whole_keys, whole_values = first.keys, first.values
    for contexts in ([3000, 17, 1, 0], [2000, 9, 0, 0], [513, 16, 1, 0]):
        first.rows = [(1, context) for context in contexts]
        metadata.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        metadata.slot_mapping.copy_(
            torch.cat([first._places(row, max(c - 1, 0), max(c, 1)) for row, c in enumerate(contexts)])
        )
        first.keys, first.values = (
            [tensor[: max(context, 1)].clone() for tensor, context in zip(whole, contexts, strict=True)]
            for whole in (whole_keys, whole_values)
        )
        k.copy_(first.new(first.keys))
        v.copy_(first.new(first.values))
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.float(), first.expected(), rtol=3e-2, atol=3e-2)
