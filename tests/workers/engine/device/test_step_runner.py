"""Layers of several shapes and windows, whose pages are those of one cache, against the plain
formula.

All that no layer may read is NaN: pages that were never used, those that a window has left, and the
null page.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.driving import resolved
from tests.workers.engine.loading import load_model
from tests.workers.engine.models.tiny_models import folder
from tests.workers.engine.native.available import needs_native
from tests.workers.engine.places import needs_interpreter
from workers.engine.backends.registry import find_backend
from workers.engine.device.step_runner import StepRunner
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.weights import Weights
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan

CPU = torch.device("cpu")
PAGES, SLOTS, LENGTH, BLOCK, SCALE = 200, 3, 72, 4, 0.3
NEAR, FAR = AttentionPattern(window=9), AttentionPattern(window=20)
FULL, SMALL = AttentionShape(2, 1, 32, SCALE), AttentionShape(4, 1, 16, SCALE)
LAYERS = (
    *(AttentionShape(4, 2, 16, SCALE, NEAR) for _ in range(5)),
    AttentionShape(2, 2, 16, SCALE, NEAR),  # fewer queries over keys of the same shape
    FULL,
    AttentionShape(4, 2, 16, SCALE, NEAR, reads=4),
    SMALL,  # twice as many tokens in a page
    FULL,
    SMALL,
    *(AttentionShape(3, 1, 24, SCALE, FAR) for _ in range(2)),  # pages with padding
    AttentionShape(2, 1, 32, SCALE, reads=9),
)
backends = pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("cpu", marks=needs_native), pytest.param("triton", marks=needs_interpreter)],
)


def make_runner(backend: str) -> StepRunner:
    model = load_model(str(folder("llama")), "float32", CPU)
    model.config = replace(model.config, layers=LAYERS)
    config = resolved(
        "llama", max_num_seqs=SLOTS, max_model_len=LENGTH, block_size=BLOCK, device="cpu", dtype="float32", threads=1
    )
    runner = StepRunner(config, find_backend(backend), model, PAGES)
    assert [(group.columns, group.pages, group.block_size) for group in runner.cache_groups.groups] == [
        (3, 6, 4),
        (1, 2, 4),
        (1, 1, 8),
        (1, 2, 4),
    ]
    return runner


class Requests:
    """One request in each slot, each group's pages in random order, and all keys and values."""

    def __init__(self, runner: StepRunner, seed: int) -> None:
        print(f"seed {seed}")
        self.runner, self.groups, self.random = runner, runner.cache_groups, random.Random(seed)
        torch.manual_seed(seed)
        self.free = self.random.sample(range(1, PAGES), PAGES - 1)
        self.blocks: dict[tuple[int, int], dict[int, list[int]]] = {}
        self.computed = [0] * SLOTS
        self.stored = {
            (layer, slot): [torch.randn(LENGTH, shape.kv_heads, shape.head_dim) for _ in "kv"]
            for layer, shape in enumerate(LAYERS)
            for slot in range(SLOTS)
        }
        self.poison(range(PAGES))

    def poison(self, pages: range | list[int]) -> None:
        for of_layer in self.runner.pages:
            by_page = of_layer if len(of_layer) == PAGES else of_layer.transpose(0, 1)
            by_page[torch.tensor(list(pages))] = torch.nan

    def plan(self, counts: dict[int, int]) -> StepPlan:
        """Return a step of so many tokens of each slot."""
        new = [block for slot, count in counts.items() for block in self._grown(slot, self.computed[slot] + count)]
        added = [AddedRequest(slot, [5], LENGTH, SamplingParams(1)) for slot in counts if not self.computed[slot]]
        slots, starts = list(counts), [self.computed[slot] for slot in counts]
        rows = [np.array(column, np.int32) for column in (slots, starts, list(counts.values()), [1] * len(slots))]
        return StepPlan(0, added, new, *rows)

    def _grown(self, slot: int, end: int) -> list[NewBlocks]:
        new = []
        for number, group in enumerate(self.groups.groups):
            held = self.blocks.setdefault((slot, number), {})
            first = max(held, default=-1) + 1
            for block in range(first, -(-end // self.groups.grid)):
                held[block] = [self.free.pop() for _ in range(group.pages)]
                new.append(NewBlocks(slot, block, held[block], number))
        return new

    def end(self, counts: dict[int, int]) -> None:
        """Count a step's tokens as computed, and free the blocks before the windows."""
        for slot, count in counts.items():
            self.computed[slot] += count
            for number, group in enumerate(self.groups.groups):
                held = self.blocks[slot, number]
                needed = group.rule.first_read(self.computed[slot])
                for block in [block for block in held if (block + 1) * self.groups.grid <= needed]:
                    pages = held.pop(block)
                    self.poison(pages)
                    self.free[:0] = pages

    def expected(self, layer: int, q: Tensor, counts: dict[int, int]) -> Tensor:
        shape = LAYERS[layer]
        reads = layer if shape.reads is None else shape.reads
        parts = []
        for query, (slot, count) in zip(q.split(list(counts.values())), counts.items(), strict=True):
            end = self.computed[slot] + count
            keys, values = (
                of[:end].repeat_interleave(shape.heads // shape.kv_heads, 1) for of in self.stored[reads, slot]
            )
            behind = torch.arange(end - count, end)[:, None] - torch.arange(end)
            seen = (behind >= 0) & (behind < (shape.pattern.window or end))
            scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
        return torch.cat(parts)

    def new(self, layer: int, counts: dict[int, int]) -> list[Tensor]:
        """Return the keys and values that a step computes for a layer."""
        return [
            torch.cat(
                [
                    self.stored[layer, slot][half][self.computed[slot] : self.computed[slot] + count]
                    for slot, count in counts.items()
                ]
            )
            for half in range(2)
        ]


def norm_of(head_dim: int) -> RMSNorm:
    weights = Weights({"norm.weight": lambda: torch.linspace(0.5, 2, head_dim)}, torch.float32, CPU)
    return RMSNorm(weights, "norm", head_dim, 1e-6)


@backends
def test_layers_of_several_shapes_share_pages(backend: str) -> None:
    """Prompts in chunks beside rows of one token, until windows have left most blocks.

    Every second step comes with rotations, by an angle of 0, and norms of queries without keys.
    """
    runner = make_runner(backend)
    requests = Requests(runner, 5)
    steps = [{0: 13, 2: 6}, {2: 1, 0: 1, 1: 30}, {1: 17, 0: 1, 2: 1}, {0: 40, 1: 1}, {2: 1, 1: 1, 0: 1}]
    for number, counts in enumerate(steps):
        inputs = runner.inputs.take(requests.plan(counts))
        attend, tokens = runner._attend(inputs), sum(counts.values())
        for layer, shape in enumerate(LAYERS):
            q = torch.randn(tokens, shape.heads, shape.head_dim)
            stored = requests.new(layer, counts) if shape.reads is None else []
            if number % 2:
                cos, sin = torch.ones(tokens, 1, shape.head_dim), torch.zeros(tokens, 1, shape.head_dim)
                norm = None if stored else norm_of(shape.head_dim)
                out = attend.rotary(layer, torch.cat([q, *stored], 1), RotaryHeads(cos, sin, norm))
                q = q if norm is None else norm(q)
            else:
                out = attend(layer, q, *(stored or (None, None)))
            torch.testing.assert_close(
                out,
                requests.expected(layer, q, counts),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, at=(number, layer): f"{at}: {m}",
            )
        requests.end(counts)
    assert min(requests.blocks[0, 0]) > 4  # most are free


def test_a_model_of_one_group_has_one_table_and_one_attention() -> None:
    model = load_model(str(folder("llama")), "float32", CPU)
    runner = StepRunner(resolved("llama", device="cpu", dtype="float32", threads=1), find_backend("torch"), model, 9)
    assert len({layer.attention for layer in runner.layers}) == 1
    assert {layer.table for layer in runner.layers} == {0}
    assert [layer.cache.data_ptr() for layer in runner.layers] == [page.data_ptr() for page in runner.pages]
    assert len(runner.pages) == len(model.config.layers)
