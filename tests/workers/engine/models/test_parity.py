"""Greedy tokens and logits equal transformers', for every family, through the real scheduler and
runner.

Prompts of very different lengths are submitted together. The variants force what could go wrong:
prompts cut into small chunks, blocks taken away and computed again, a step that runs ahead, and
blocks found in the prefix cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.workers.engine.cache_sizes import block_bytes
from tests.workers.engine.models.tiny_models import (
    EACH_MODEL,
    MODELS,
    PROMPT_LENGTHS,
    Reference,
    folder,
    make,
    reference,
)
from tests.workers.engine.places import GPU, Place, at_all, interpreted
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.device.model_runner import ModelRunner
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.messages.step import TokenMasks
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampled

LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ParityVariant:
    depth: int = 0
    max_num_batched_tokens: int = 2048
    num_blocks: int = 100
    enable_prefix_caching: bool = False
    max_num_seqs: int = 8
    max_model_len: int = 224


VARIANTS = {
    "plain": ParityVariant(),
    "ahead": ParityVariant(depth=1),
    "chunked": ParityVariant(max_num_batched_tokens=16),
    "chunked-ahead": ParityVariant(max_num_batched_tokens=16, depth=1),
    "preempted": ParityVariant(num_blocks=20),
    "preempted-ahead-chunked": ParityVariant(num_blocks=20, depth=1, max_num_batched_tokens=24),
    "few-slots": ParityVariant(max_num_seqs=2, depth=1),
    "cached": ParityVariant(enable_prefix_caching=True),
    "cached-preempted-ahead": ParityVariant(
        enable_prefix_caching=True, num_blocks=20, depth=1, max_num_batched_tokens=40
    ),
}


class LogitsRecorder:
    """Keeps the logits behind every token that a runner samples, under the request's number, which
    travels as its seed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        self._request_of: dict[int, int] = {}
        sampler = runner.sampler
        self._set, self._sample = sampler.set, sampler.sample
        sampler.set, sampler.sample = self.set, self.sample
        # A graph ends at the hidden states then, and its rows come through `sample`
        sampler.needs_stages = lambda slots: np.ones(len(slots), np.bool_)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._set(slot, params)
        self._request_of[slot] = params.seed

    def sample(self, logits: Tensor, rows: SampledRows, masks: TokenMasks | None = None) -> Sampled:
        for row, slot, index in zip(logits, rows.slots, rows.indices, strict=True):
            self.logits[self._request_of[int(slot)], int(index)] = row.to("cpu", copy=True)
        sampled: Sampled = self._sample(logits, rows, masks)
        return sampled


def start(name: str, variant: ParityVariant, place: Place, **settings: str) -> tuple[EngineCore, LogitsRecorder]:
    per_block = block_bytes(open_checkpoint(str(folder(name))).config, torch.float32, 16)
    config = EngineConfig(
        model=str(folder(name)),
        threads=torch.get_num_threads(),
        max_model_len=variant.max_model_len,
        block_size=16,
        max_num_seqs=variant.max_num_seqs,
        max_num_batched_tokens=variant.max_num_batched_tokens,
        kv_cache_memory_bytes=variant.num_blocks * per_block,
        enable_prefix_caching=variant.enable_prefix_caching,
        depth=variant.depth,
        **place.settings(),  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
    )
    executor = Executor(config)
    return EngineCore(executor), LogitsRecorder(executor.runner)


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    cached: list[int]  # prompt tokens that came from the prefix cache
    preemptions: int


def answers(core: EngineCore, expected: Reference, first_id: int = 0) -> Answers:
    """What the core answers to all prompts submitted together."""
    length = len(expected.tokens[0])
    sampling = [
        SamplingParams(max_tokens=length, temperature=0.0, seed=number) for number in range(len(expected.prompts))
    ]
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


def assert_same(expected: Reference, got: Answers, sampler: LogitsRecorder) -> None:
    assert got.tokens == expected.tokens
    for request, logits in enumerate(expected.logits):
        ours = torch.stack([sampler.logits[request, index] for index in range(len(logits))])
        assert (ours - logits).abs().max() < LOGITS_TOLERANCE


@pytest.mark.proof
@pytest.mark.parametrize("name", MODELS)
def test_reference_is_telling(name: str) -> None:
    expected = reference(name)
    for tokens, logits in zip(expected.tokens, expected.logits, strict=True):
        assert len(set(tokens)) >= 20
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).min() > 5 * LOGITS_TOLERANCE


@pytest.mark.usefixtures("crowded")
@at_all
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", EACH_MODEL)
def test_same_as_transformers(name: str, variant: str, place: Place) -> None:
    expected = reference(name)
    core, sampler = start(name, VARIANTS[variant], place)
    got = answers(core, expected)
    assert_same(expected, got, sampler)
    scarce, layers = VARIANTS[variant].num_blocks < 40, core._executor.model_config.layers
    if not scarce or all(layer.pattern.window is None and layer.reads is None for layer in layers):
        assert (got.preemptions > 0) == scarce  # else memory is enough


@at_all
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", EACH_MODEL)
def test_second_submission_hits_the_cache(name: str, depth: int, place: Place) -> None:
    expected = reference(name)
    core, sampler = start(name, ParityVariant(depth=depth, enable_prefix_caching=True), place)
    answers(core, expected)
    sampler.logits.clear()
    got = answers(core, expected, first_id=100)
    assert_same(expected, got, sampler)
    length_dependent = name in ("granite-longrope", "rope-dynamic", "rope-longrope")
    hits = [0 if length_dependent else (len(prompt) - 1) // 16 * 16 for prompt in expected.prompts]
    assert got.cached == hits


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_keys_and_values_of_8_bits_are_rounded_and_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is transformers' with every key and value rounded as it enters the cache."""
    expected, model = reference(name), make(MODELS[name])
    for layer in (DynamicLayer, DynamicSlidingWindowLayer):
        monkeypatch.setattr(layer, "update", rounding(layer.update))
    core, sampler = start(name, ParityVariant(depth=1), GPU, kv_cache_dtype="fp8")
    answers(core, expected)
    for request, prompt in enumerate(expected.prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), use_cache=True).logits[0, -1]
        assert torch.cosine_similarity(sampler.logits[request, 0], logits, dim=0) > 0.9995
    assert any(
        torch.cosine_similarity(sampler.logits[request, 0], logits[0], dim=0) < 0.995
        for request, logits in enumerate(expected.logits)
    )


def rounding(update: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(layer: object, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
        keys, values = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (keys, values))
        return update(layer, keys, values, *rest, **named)

    return rounded


SMALL = ParityVariant(num_blocks=7, max_model_len=80, max_num_seqs=2, max_num_batched_tokens=24, depth=1)
"""Chunks, a step ahead, and a block too few for what `small` gives: one of the two is preempted."""


def small(expected: Reference) -> Reference:
    """Prompts of 40 and 17 tokens and the beginnings of their answers: the interpreter takes a
    second for a handful of tokens.
    """
    chosen = [PROMPT_LENGTHS.index(length) for length in (40, 17)]
    prompts, tokens, logits = (
        ([every[number] for number in chosen]) for every in (expected.prompts, expected.tokens, expected.logits)
    )
    return Reference(prompts, [some[:17] for some in tokens], [some[:17] for some in logits])


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("rope-linear", "rope-llama3", "rope-yarn")])
@pytest.mark.parametrize("place", [interpreted])
def test_same_as_transformers_by_the_gpus_kernels(name: str, place: Place) -> None:
    """Kernels and inputs made on the device: what a GPU runs where nothing is recorded. Tables of
    positions that are computed once are the same for every device, so one such model is enough.
    """
    expected = small(reference(name))
    core, sampler = start(name, SMALL, place)
    got = answers(core, expected)
    assert_same(expected, got, sampler)
    if all(layer.pattern.window is None and layer.reads is None for layer in core._executor.model_config.layers):
        assert got.preemptions > 0  # else memory is enough
