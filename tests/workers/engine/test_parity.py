"""Greedy tokens and logits equal transformers', for every family, through the real scheduler and runner.

Prompts of very different lengths are submitted together. The variants force what could go wrong: prompts cut into small chunks, blocks
taken away and computed again, a step that runs ahead, and blocks found in the prefix cache.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.workers.engine.tiny_models import MODELS, NEW_TOKENS, VOCAB, Reference, folder, reference
from workers.engine.cache_plan import block_bytes
from workers.engine.config import EngineConfig
from workers.engine.core import EngineCore
from workers.engine.executor import Executor
from workers.engine.loader import open_checkpoint
from workers.engine.messages import EngineRequest, SamplingParams
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampled, Sampler

LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Variant:
    depth: int = 0
    max_num_batched_tokens: int = 2048
    num_blocks: int = 100
    enable_prefix_caching: bool = False
    max_num_seqs: int = 8


VARIANTS = {
    "plain": Variant(),
    "ahead": Variant(depth=1),
    "chunked": Variant(max_num_batched_tokens=16),
    "chunked-ahead": Variant(max_num_batched_tokens=16, depth=1),
    "preempted": Variant(num_blocks=20),
    "preempted-ahead-chunked": Variant(num_blocks=20, depth=1, max_num_batched_tokens=24),
    "few-slots": Variant(max_num_seqs=2, depth=1),
    "cached": Variant(enable_prefix_caching=True),
    "cached-preempted-ahead": Variant(enable_prefix_caching=True, num_blocks=20, depth=1, max_num_batched_tokens=40),
}


class RecordingSampler(Sampler):
    """Keeps the logits behind every token, under the request's number, which travels as its seed."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, VOCAB)
        self.request_of: dict[int, int] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}

    def set(self, slot: int, params: SamplingParams) -> None:
        super().set(slot, params)
        self.request_of[slot] = params.seed

    def sample(self, logits: Tensor, rows: SampledRows) -> Sampled:
        for row, slot, index in zip(logits, rows.slots, rows.indices, strict=True):
            self.logits[self.request_of[int(slot)], int(index)] = row.clone()
        return super().sample(logits, rows)


def start(name: str, variant: Variant) -> tuple[EngineCore, RecordingSampler]:
    per_block = block_bytes(open_checkpoint(str(folder(name))).config, torch.float32, 16)
    config = EngineConfig(
        model=str(folder(name)),
        dtype="float32",
        device="cpu",
        threads=torch.get_num_threads(),
        max_model_len=224,
        block_size=16,
        max_num_seqs=variant.max_num_seqs,
        max_num_batched_tokens=variant.max_num_batched_tokens,
        kv_cache_memory_bytes=variant.num_blocks * per_block,
        enable_prefix_caching=variant.enable_prefix_caching,
        depth=variant.depth,
        debug=True,
    )
    executor = Executor(config)
    sampler = executor.runner.sampler = RecordingSampler(variant.max_num_seqs)
    return EngineCore(executor), sampler


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    cached: list[int]  # prompt tokens that came from the prefix cache
    preemptions: int


def answers(core: EngineCore, expected: Reference, first_id: int = 0) -> Answers:
    """What the core answers to all prompts submitted together."""
    sampling = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, seed=number) for number in range(len(expected.prompts))]
    core.add(EngineRequest(first_id + i, prompt, [], sampling[i]) for i, prompt in enumerate(expected.prompts))
    tokens: list[list[int]] = [[] for _ in expected.prompts]
    cached = [0] * len(tokens)
    preemptions = 0
    while core.busy:
        output = core.step()
        if output is None:
            continue
        preemptions = output.stats.preemptions
        flat = iter(output.token_ids)
        for i, request_id in enumerate(output.request_ids):
            tokens[request_id - first_id] += [next(flat) for _ in range(output.counts[i])]
            cached[request_id - first_id] += output.cached_tokens[i]
    return Answers(tokens, cached, preemptions)


def assert_same(expected: Reference, got: Answers, sampler: RecordingSampler) -> None:
    assert got.tokens == expected.tokens
    for request, logits in enumerate(expected.logits):
        ours = torch.stack([sampler.logits[request, index] for index in range(NEW_TOKENS)])
        assert (ours - logits).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_reference_is_telling(name: str) -> None:
    expected = reference(name)
    for tokens, logits in zip(expected.tokens, expected.logits, strict=True):
        assert len(set(tokens)) >= 20
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).min() > 5 * LOGITS_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_same_as_transformers(name: str, variant: str) -> None:
    expected = reference(name)
    core, sampler = start(name, VARIANTS[variant])
    got = answers(core, expected)
    assert_same(expected, got, sampler)
    assert (got.preemptions > 0) == (VARIANTS[variant].num_blocks < 40)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_second_submission_hits_the_cache(name: str, depth: int) -> None:
    expected = reference(name)
    core, sampler = start(name, Variant(depth=depth, enable_prefix_caching=True))
    answers(core, expected)
    sampler.logits.clear()
    got = answers(core, expected, first_id=100)
    assert_same(expected, got, sampler)
    length_dependent = name in ("rope-dynamic", "rope-longrope")
    hits = [0 if length_dependent else (len(prompt) - 1) // 16 * 16 for prompt in expected.prompts]
    assert got.cached == hits
