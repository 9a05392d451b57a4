"""A decoder's layers in one call against the same kernels called one by one: the same bits."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, zip_longest

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.attention.context import CachedLayer, Interruption, StepAttention
from workers.engine.backends.registry import find_backend
from workers.engine.layers.base import (
    AttentionPart,
    AttentionPattern,
    AttentionShape,
    DecoderLayer,
    MlpPart,
    Rotation,
)
from workers.engine.layers.norm import LayerNorm, RMSNorm
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.rotary import Rotary
from workers.engine.layers.stack import LayerStack
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import StepAbandoned
from workers.engine.native.ops import NativeOps
from workers.engine.native.stack import NativeStack

pytestmark = needs_native

CPU = torch.device("cpu")
HIDDEN, WIDTH, LAYERS, BLOCK, BLOCKS = 48, 80, 3, 16, 160
SCALES = (0.25, 0.2, 0.3)
PATTERNS = (AttentionPattern(), AttentionPattern(window=24), AttentionPattern())
BOTH_SIDES = tuple(AttentionPattern(False, pattern.window) for pattern in PATTERNS)
STEPS = [
    [(0, 700), (700, 30)],
    [(700, 1), (730, 1)],
    [(701, 5), (731, 1)],
    [(706, 1)],
]  # tokens computed before and now, by row
TEXTS = [[(0, 700), (0, 30)], [(0, 5), (0, 1)], [(0, 290)]]
FAMILIES = ["gpt2", "llama", "qwen3", "bert", "modernbert", "mpnet"]


@functools.cache
def ropes(dtype: torch.dtype) -> list[Rotary]:
    return [Rotary(RopeConfig(theta, "default", {}, 1024), 16, 1024, dtype, CPU) for theta in (1e4, 1e2)]


class Model:
    """Layers as one of the families has them, `heads` of queries over `kv_heads`, and a cache for
    two rows.
    """

    def __init__(self, family: str, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> None:
        torch.manual_seed(7)
        self.dtype, self.ropes, random = dtype, ropes(dtype), self.random
        self.rotary, self.head_norms, self.numbers = family not in ("gpt2", "bert", "mpnet"), family == "qwen3", count()
        self.encodes, first_norm = family in ("bert", "modernbert", "mpnet"), family != "modernbert"
        self.post_norm = self.encodes and first_norm
        self.bias = torch.randn(heads, 61) if family == "mpnet" else None
        patterns, self.steps = (BOTH_SIDES, TEXTS) if self.encodes else (PATTERNS, STEPS)
        if family == "gpt2":
            kv_heads = heads
        limited = family == "qwen3"  # also by sinks
        shapes = [
            AttentionShape(heads, kv_heads, dim, *each, soft_cap=1.5 if limited else None)
            for each in zip(SCALES, patterns, strict=True)
        ]
        ops, queries, keys = NativeOps(), heads * dim, kv_heads * dim
        self.layers = [
            DecoderLayer(
                AttentionPart(
                    shape,
                    ops.linear(random(queries + 2 * keys, HIDDEN, width=0.2), random(queries + 2 * keys)),
                    ops.linear(random(HIDDEN, queries, width=0.2), None),
                    *(RMSNorm(*self.named(dim)) for _ in range(2 * self.head_norms)),
                    rotation=self.encodes * layer % 2,
                    sinks=torch.randn(heads) if limited else None,
                ),
                MlpPart(
                    ops.gated_linear(random(2 * WIDTH, HIDDEN, width=0.2), None, "silu")
                    if self.rotary
                    else ops.linear(random(WIDTH, HIDDEN, width=0.2), random(WIDTH), "gelu_new"),
                    ops.linear(random(HIDDEN, WIDTH, width=0.2), random(HIDDEN)),
                ),
                self.norm(HIDDEN) if first_norm or layer else None,
                self.norm(HIDDEN),
            )
            for layer, shape in enumerate(shapes)
        ]
        self.shape, self.heads = CacheShape(BLOCKS, BLOCK, kv_heads, dim), heads
        last_norm = None if self.post_norm else self.norm(HIDDEN)
        self.stack = ops.stack(self.layers, last_norm, self.post_norm)
        self.attention = find_backend("cpu").attention(self.shape, heads, dtype, CPU)

    def cached(self, caches: Sequence[Tensor] | None = None, columns: int = 1) -> list[CachedLayer]:
        """Return the layers with these caches, or with new ones, and with block tables in turn."""
        caches = self.attention.new_cache(LAYERS) if caches is None else caches
        shapes = (layer.attention.shape for layer in self.layers)
        tables = (layer % columns for layer in range(LAYERS))
        return [CachedLayer(self.attention, *each) for each in zip(caches, shapes, tables, strict=True)]

    def random(self, *shape: int, width: float = 1.0) -> Tensor:
        return torch.randn(shape).mul(width).to(self.dtype)

    def norm(self, size: int) -> RMSNorm | LayerNorm:
        return RMSNorm(*self.named(size)) if self.rotary else LayerNorm(*self.named(size))

    def named(self, size: int) -> tuple[Weights, str, int, float]:
        name = str(next(self.numbers))
        values = {f"{name}.{part}": self.random(size) for part in ("weight", "bias")}
        return (
            Weights(
                {key: lambda value=value: value for key, value in values.items()}, self.dtype, CPU, ops=NativeOps()
            ),
            name,
            size,
            1e-5,
        )  # type: ignore[misc]

    def run(
        self, one_call: bool, moves: bool = False, needed: Sequence[Tensor | None] = (), columns: int = 1
    ) -> list[Tensor]:
        """Return the hidden states of each of the family's steps; `needed` has the tokens of each
        step whose hidden states are read, all of them by default.

        If it `moves`, the cache is at another place in each, and its old place is overwritten.
        """
        caches = [cache.zero_() for cache in self.attention.new_cache(LAYERS)]
        torch.manual_seed(8)
        results = []
        for rows, tokens in zip_longest(self.steps, needed):
            if moves:
                before, caches = caches, [cache.clone() for cache in caches]
                for cache in before:
                    cache.fill_(torch.nan)
            metadata, positions = [step_of(rows, column)[0] for column in range(columns)], step_of(rows)[1]
            count = self.rotary + self.encodes if self.rotary else 0
            rotations: list[Rotation] = [rope.cos_sin(positions, positions + 1) for rope in self.ropes[:count]]
            attend = StepAttention(self.cached(caches, columns), metadata, bias=self.bias, needed=tokens)
            run = self.stack if one_call else super(NativeStack, self.stack).__call__
            results.append(run(self.random(len(positions), HIDDEN), rotations, attend).clone())
        return results


def step_of(rows: list[tuple[int, int]], column: int = 0) -> tuple[AttentionMetadata, Tensor]:
    """Each row has half of the blocks, in another order in each column."""
    tables = np.roll(np.arange(BLOCKS, dtype=np.int32).reshape(2, -1), 5 * column, 1)[: len(rows)]
    before, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    positions = np.concatenate([np.arange(first, first + number) for first, number in zip(before, counts, strict=True)])
    slots = (
        tables[np.repeat(np.arange(len(rows)), counts), positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    )
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return AttentionMetadata(torch.from_numpy(slots), starts, before + counts, tables), torch.from_numpy(positions)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_gives_the_same_bits(family: str, threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    model = Model(family, dtype)
    assert isinstance(model.stack, NativeStack)
    for one, by_one in zip(model.run(one_call=True), model.run(one_call=False), strict=True):
        assert one.isfinite().all()
        assert one.equal(by_one)


@pytest.mark.parametrize("family", ["llama", "mpnet"])
def test_layers_with_block_tables_of_their_own_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = Model(family, dtype)
    for one, by_one in zip(model.run(one_call=True, columns=2), model.run(one_call=False), strict=True):
        assert one.equal(by_one)


@pytest.mark.parametrize("which", ["the last", "the first", "none", "all", "any"])
@pytest.mark.parametrize("family", FAMILIES)
def test_needed_tokens_have_the_same_bits(family: str, which: str, dtype: torch.dtype) -> None:
    """Also in later steps, which read the keys and values of the others; their own hidden states
    are not computed.
    """
    model = Model(family, dtype)
    needed = [needed_of(rows, which) for rows in model.steps]
    for one, by_one, tokens in zip(
        model.run(one_call=True, needed=needed), model.run(one_call=False), needed, strict=True
    ):
        assert one[tokens].equal(by_one[tokens])
        assert one.equal(by_one) is (len(tokens) == len(one))


def needed_of(rows: list[tuple[int, int]], which: str) -> Tensor:
    counts = torch.tensor([number for _, number in rows])
    ends, total = counts.cumsum(0), int(counts.sum())
    some = torch.randperm(total, generator=torch.Generator().manual_seed(total))[: total // 3].sort()[0]
    choices = {"the last": ends - 1, "the first": ends - counts, "none": ends[:0], "all": torch.arange(total)}
    return choices.get(which, some).repeat_interleave(2)[::2]  # a step's own are not contiguous, either


def test_buffers_grow_seldom(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    cached = model.cached()
    places = set()
    for tokens in range(1, 260):
        metadata, positions = step_of([(0, tokens)])
        attend = StepAttention(cached, [metadata])
        places.add(
            model.stack(
                model.random(tokens, HIDDEN), [model.ropes[0].cos_sin(positions, positions + 1)], attend
            ).data_ptr()
        )
    assert len(places) <= 4  # 64, 128, 256 and 512


def test_a_stack_of_no_layers_is_its_norm(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    norm, hidden = model.norm(HIDDEN), model.random(5, HIDDEN)
    stack = NativeOps().stack([], norm)
    metadata, positions = step_of([(0, 5)])
    attend = StepAttention([], [metadata])
    assert stack(hidden.clone(), [model.ropes[0].cos_sin(positions, positions + 1)], attend).equal(norm(hidden))


def test_caches_that_were_made_anew_are_the_ones_that_are_used(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    for moved, stayed in zip(model.run(one_call=True, moves=True), model.run(one_call=False), strict=True):
        assert moved.equal(stayed)


def test_an_interrupted_call_ends_with_an_error_and_the_next_is_right(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    interruption = Interruption()
    metadata, positions = step_of([(0, 40)])
    attend = StepAttention(model.cached(), [metadata], interruption)
    hidden, rotations = model.random(40, HIDDEN), [model.ropes[0].cos_sin(positions, positions + 1)]
    expected = model.stack(hidden.clone(), rotations, attend).clone()
    interruption.set()
    for stack in (model.stack, super(NativeStack, model.stack).__call__):
        with pytest.raises(StepAbandoned):
            stack(hidden.clone(), rotations, attend)
    interruption.clear()
    assert model.stack(hidden.clone(), rotations, attend).equal(expected)


def test_it_reports_where_the_time_goes(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    assert isinstance(model.stack, NativeStack)
    assert not any(model.stack.seconds.values())
    model.run(one_call=True)
    assert all(seconds > 0 for seconds in model.stack.seconds.values())


def test_layers_without_packed_matrices_are_called_one_by_one(dtype: torch.dtype) -> None:
    model = Model("llama", dtype)
    plain = replace(model.layers[0], mlp=MlpPart(lambda x: x, lambda x: x))
    assert type(NativeOps().stack([*model.layers, plain], model.norm(HIDDEN))) is LayerStack


def test_another_backend_attends_layer_by_layer(dtype: torch.dtype) -> None:
    model = Model("qwen3", dtype)
    expected = model.run(one_call=False)
    model.attention = find_backend("torch").attention(model.shape, model.heads, dtype, CPU)
    for got, wanted in zip(model.run(one_call=True), expected, strict=True):
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
