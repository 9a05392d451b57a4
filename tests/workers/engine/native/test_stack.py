"""A decoder's layers in one call against the same kernels called one by one: the same bits."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.attention.base import Attention, AttentionMetadata, CacheShape
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
from workers.engine.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm, RowRMSNorm
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Shard
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
ENCODERS = ["bert", "modernbert", "mpnet"]
DECODERS = ["gpt2", "llama", "qwen3", "gemma", "neox", "cohere", "olmo", "granite", "hunyuan", "mixed", "partly"]
FAMILIES = DECODERS + ENCODERS
LAYER_NORMS = ["gpt2", "bert", "mpnet", "neox", "cohere"]
CAPPED = ["gpt2", "qwen3"]  # with sinks, too
UNROTATED = ["gpt2", "bert", "mpnet"]
# Heads, key-value heads and head size of each layer
DIFFERING = [(4, 2, 16), (2, 1, 32), (6, 3, 16)]


@functools.cache
def ropes(dtype: torch.dtype, second: int) -> list[Rotary]:
    kinds = (1e4, 16), (1e2, second)
    return [Rotary(RopeConfig(theta, "default", {}, 1024), dim, 1024, dtype, CPU) for theta, dim in kinds]


class Model:
    """Layers as one of the families has them, and a cache for two rows.

    Those of the family "mixed" differ in heads and widths; "partly" has an MLP that is not in C.
    """

    def __init__(self, family: str, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> None:
        torch.manual_seed(7)
        self.family, self.dtype, self.numbers, self.ops = family, dtype, count(), NativeOps()
        self.rotary, self.encodes, first_norm = family not in UNROTATED, family in ENCODERS, family != "modernbert"
        self.post_norm = self.encodes and first_norm
        self.rotations = self.rotary * (2 if self.encodes or family == "mixed" else 1)
        self.ropes = ropes(dtype, 32 if family == "mixed" else dim)
        self.bias = torch.randn(heads, 61) if family == "mpnet" else None
        patterns, self.steps = (BOTH_SIDES, TEXTS) if self.encodes else (PATTERNS, STEPS)
        alike = (heads, heads if family == "gpt2" else kv_heads, dim)
        sizes = DIFFERING if family == "mixed" else [alike] * LAYERS
        cap = 1.5 if family in CAPPED else None
        self.shapes = [
            AttentionShape(*size, *each, soft_cap=cap)
            for size, each in zip(sizes, zip(SCALES, patterns, strict=True), strict=True)
        ]
        self.layers = [
            self.of_family(
                index,
                DecoderLayer(
                    self.attention_part(index),
                    self.mlp(WIDTH + 16 * index * (family == "mixed")),
                    self.norm(HIDDEN) if first_norm or index else None,
                    self.norm(HIDDEN),
                ),
            )
            for index in range(LAYERS)
        ]
        self.stack = self.ops.stack(self.layers, None if self.post_norm else self.norm(HIDDEN), self.post_norm)
        self.take_attention("cpu")

    def take_attention(self, backend: str) -> None:
        found: dict[tuple[int, int, int], Attention] = {}
        for shape in self.shapes:
            key, cache = (shape.heads, shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.head_dim)
            if key not in found:
                cache_shape = CacheShape(BLOCKS, BLOCK, *cache)
                found[key] = find_backend(backend).attention(cache_shape, shape.heads, self.dtype, CPU)
        self.attentions = [found[shape.heads, shape.kv_heads, shape.head_dim] for shape in self.shapes]

    def attention_part(self, index: int) -> AttentionPart:
        shape, random, linear = self.shapes[index], self.random, self.ops.linear
        width = shape.queries + 2 * shape.keys
        rotation = int(shape.head_dim == 32) if self.family == "mixed" else self.encodes * index % 2
        part = AttentionPart(
            shape,
            linear(random(width, HIDDEN, width=0.2), random(width)),
            linear(random(HIDDEN, shape.queries, width=0.2), None),
            rotation=rotation,
            sinks=torch.randn(shape.heads) if self.family in CAPPED else None,
        )
        if self.family in ("qwen3", "hunyuan", "gemma"):
            norms = [self.norm(shape.head_dim) for _ in "qk"]
            part = replace(part, query_norm=norms[0], key_norm=norms[1], norm_after_rotation=self.family == "hunyuan")
        if self.family == "cohere":
            of_heads = [self.norm_by_head(n) for n in (4, 2)]
            part = replace(part, query_norm=of_heads[0], key_norm=of_heads[1])
        if self.family == "olmo":
            sizes = shape.queries, shape.keys
            weights = Weights(
                {f"{n}.weight": lambda size=size: self.random(size) for n, size in enumerate(sizes)},  # type: ignore[misc]
                self.dtype,
                CPU,
                ops=self.ops,
            )
            rows = [Shard(0, size, size) for size in sizes]
            part = replace(part, row_norm=RowRMSNorm(weights, ["0", "1"], rows, 1e-5))
        return part

    def norm_by_head(self, heads: int) -> HeadLayerNorm:
        weights, name = self.named(heads, 16)
        return HeadLayerNorm(weights, name, Shard(0, heads, heads), 16, 1e-5)

    def mlp(self, width: int) -> MlpPart:
        random = self.random
        return MlpPart(
            self.ops.gated_linear(random(2 * width, HIDDEN, width=0.2), None, "silu")
            if self.family not in LAYER_NORMS
            else self.ops.linear(random(width, HIDDEN, width=0.2), random(width), "gelu_new"),
            self.ops.linear(random(HIDDEN, width, width=0.2), random(HIDDEN)),
        )

    def of_family(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        if self.family in ("gemma", "olmo"):
            results = self.norm(HIDDEN), self.norm(HIDDEN)
            layer = replace(layer, attention_result_norm=results[0], mlp_result_norm=results[1])
        changes: dict[str, dict[str, Any]] = {
            "olmo": {"attention_norm": None, "mlp_norm": None},
            "neox": {"parallel": True},
            "cohere": {"parallel": True, "mlp_norm": None},
            "granite": {"factor": 0.22},
        }
        if self.family == "partly" and index == 1:
            layer = replace(layer, mlp=self.plain_mlp())
        return replace(layer, **changes.get(self.family, {}))

    def plain_mlp(self) -> MlpPart:
        """Return an MLP whose products are torch's."""
        plain, random = TorchOps(), self.random
        up = plain.linear(random(WIDTH, HIDDEN, width=0.2), None, "relu")
        return MlpPart(up, plain.linear(random(HIDDEN, WIDTH, width=0.2), None))

    def cached(self, caches: Sequence[Tensor] | None = None, columns: int = 1) -> list[CachedLayer]:
        """Return the layers with these caches, or with new ones, and with block tables in turn."""
        caches = self.new_caches() if caches is None else caches
        tables = (layer % columns for layer in range(LAYERS))
        return [CachedLayer(*each) for each in zip(self.attentions, caches, self.shapes, tables, strict=True)]

    def new_caches(self) -> list[Tensor]:
        return [attention.new_cache(1)[0].zero_() for attention in self.attentions]

    def random(self, *shape: int, width: float = 1.0) -> Tensor:
        return torch.randn(shape).mul(width).to(self.dtype)

    def norm(self, size: int) -> RMSNorm | LayerNorm:
        if self.family in LAYER_NORMS:
            return LayerNorm(*self.named(size), size, 1e-5)
        return RMSNorm(*self.named(size), size, 1e-5, float(self.family == "gemma"))

    def named(self, *shape: int) -> tuple[Weights, str]:
        """Return a norm's random weight and bias, and their name."""
        name = str(next(self.numbers))
        values = {f"{name}.{part}": self.random(*shape) for part in ("weight", "bias")}
        readers = {key: lambda value=value: value for key, value in values.items()}
        return Weights(readers, self.dtype, CPU, ops=self.ops), name  # type: ignore[arg-type]

    def run(
        self, one_call: bool, moves: bool = False, needed: Sequence[Tensor | None] = (), columns: int = 1
    ) -> list[Tensor]:
        """Return the hidden states of each of the family's steps; `needed` has the tokens of each
        step whose hidden states are read, all of them by default.

        If it `moves`, the cache is at another place in each, and its old place is overwritten.
        """
        caches = self.new_caches()
        torch.manual_seed(8)
        results = []
        for rows, tokens in zip_longest(self.steps, needed):
            if moves:
                before, caches = caches, [cache.clone() for cache in caches]
                for cache in before:
                    cache.fill_(torch.nan)
            metadata, positions = [step_of(rows, column)[0] for column in range(columns)], step_of(rows)[1]
            rotations: list[Rotation] = [
                rope.cos_sin(positions, positions + 1) for rope in self.ropes[: self.rotations]
            ]
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


@pytest.mark.parametrize("family", ["llama", "partly"])
def test_an_interrupted_call_ends_with_an_error_and_the_next_is_right(family: str, dtype: torch.dtype) -> None:
    model = Model(family, dtype)
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


@pytest.mark.parametrize("plain", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_layers_without_packed_matrices_are_called_one_by_one(plain: tuple[int, ...], dtype: torch.dtype) -> None:
    """Others run in calls between them; without any others it is a plain stack."""
    model = Model("llama", dtype)
    layers = [
        replace(layer, mlp=model.plain_mlp()) if index in plain else layer for index, layer in enumerate(model.layers)
    ]
    model.stack = model.ops.stack(layers, model.norm(HIDDEN))
    assert isinstance(model.stack, NativeStack) is (len(plain) < LAYERS)
    by_one = LayerStack(layers, model.stack.norm)
    needed = [needed_of(rows, "any") for rows in model.steps]
    wanted = model.run(one_call=True, needed=needed)
    model.stack = by_one
    for one, other, tokens in zip(wanted, model.run(one_call=True), needed, strict=True):
        assert one[tokens].equal(other[tokens])


def test_another_backend_attends_layer_by_layer(dtype: torch.dtype) -> None:
    model = Model("qwen3", dtype)
    expected = model.run(one_call=False)
    model.take_attention("torch")
    for got, wanted in zip(model.run(one_call=True), expected, strict=True):
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
