"""Every stage, in a batch of mixed rows, against its definition row by row."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.sampling.plain import (
    SampledRow,
    plain_logits,
    plain_probabilities,
    plain_token,
    random_row,
    sampled_rows,
    sampler_for,
)
from workers.engine.messages.core import EVERY_FEATURE, SamplingParams
from workers.engine.messages.step import NO_TOKEN
from workers.engine.sampling import penalties
from workers.engine.sampling.limits import nucleus_floors
from workers.engine.sampling.logit_masks import logit_stages
from workers.engine.sampling.sampler import Sampled

VOCAB = 700
EOS = (3, 690)
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
}
STAGES = {
    "logit_bias": ("logit_bias",),
    "min_tokens": ("min_tokens",),
    "allowed_token_ids": ("allowed_token_ids",),
    "bad_words": ("bad_words",),
    "repetition": ("repetition_penalty",),
    "presence": ("presence_penalty",),
    "frequency": ("frequency_penalty",),
    "temperature": ("temperature",),
    "min_p": ("temperature", "min_p"),
    "top_k": ("temperature", "top_k"),
    "top_p": ("temperature", "top_p"),
    "all": tuple(OFF),
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3.0


def random_rows(stage: str, seed: int, number: int = 64) -> list[SampledRow]:
    draw = random.Random(f"{stage} {seed}")
    off = {name: value for name, value in OFF.items() if name not in STAGES[stage]}
    return [random_row(draw, VOCAB, **(off if draw.random() < 0.8 else OFF)) for _ in range(number)]


def sample(logits: Tensor, rows: list[SampledRow]) -> Sampled:
    return sampler_for(rows, VOCAB, EOS).sample(logits.clone(), sampled_rows(rows, VOCAB, logits.device))


def changed(logits: Tensor, rows: list[SampledRow]) -> Tensor:
    """The logits as they are before the temperature."""
    sampler, batch, logits = sampler_for(rows, VOCAB, EOS), sampled_rows(rows, VOCAB, logits.device), logits.clone()
    for stage in sampler._stages:
        stage.apply(logits, batch)
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
@pytest.mark.parametrize("stage", STAGES)
def test_mixed_rows_follow_the_definition(stage: str, seed: int, device: str) -> None:
    rows, logits = random_rows(stage, seed), random_logits(64, seed=seed)
    expected = [plain_logits(logits[i], row, EOS) for i, row in enumerate(rows)]
    logits = logits.to(device)
    np.testing.assert_allclose(changed(logits, rows).cpu().numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)
    assert sample(logits, rows).tokens.tolist() == [plain_token(z, row) for z, row in zip(expected, rows, strict=True)]


def test_a_row_gets_what_it_gets_alone() -> None:
    rows, logits = random_rows("all", seed=9), random_logits(64, seed=9)
    together = sample(logits, rows)
    items = iter(together.logprobs.to_host() if together.logprobs else ())
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.tokens.tolist() == [together.tokens[i]]
        if row.params.logprobs >= 0:
            assert alone.logprobs is not None
            assert alone.logprobs.to_host() == [next(items)]


def test_penalties_in_parts_are_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = random_rows("all", seed=4), random_logits(64, seed=4)
    at_once = changed(logits, rows)
    monkeypatch.setattr(penalties, "_COUNTERS", 5 * VOCAB)
    assert torch.equal(changed(logits, rows), at_once)
    monkeypatch.setattr(penalties, "_PLACES", 1)
    assert torch.equal(changed(logits, rows), at_once)


def test_a_slots_next_request_inherits_nothing() -> None:
    rows, logits = random_rows("all", seed=2), random_logits(64, seed=2)
    sampler, batch = sampler_for(rows, VOCAB, EOS), sampled_rows(rows, VOCAB)
    sampler.sample(logits.clone(), batch)
    for slot in batch.slots.tolist():
        sampler.set(slot, SamplingParams(max_tokens=1, temperature=0.0))
    again = sampler.sample(logits.clone(), batch)
    assert torch.equal(again.tokens, logits.argmax(-1))
    assert again.logprobs is None


def test_logprobs_are_the_models_own() -> None:
    rows, logits = random_rows("all", seed=1), random_logits(64, seed=1)
    sampled = sample(logits, rows)
    assert sampled.asking.tolist() == [i for i, row in enumerate(rows) if row.params.logprobs >= 0]
    assert sampled.logprobs is not None
    for i, item in zip(sampled.asking.tolist(), sampled.logprobs.to_host(), strict=True):
        expected, token = logits[i].double().log_softmax(-1), int(sampled.tokens[i])
        best = expected.sort(descending=True).indices[: rows[i].params.logprobs].tolist()
        assert item.token_ids == [token, *best]
        np.testing.assert_allclose(item.logprobs, expected[item.token_ids], atol=1e-5)
        assert item.rank == int((expected > expected[token]).sum()) + 1


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    row = SampledRow([1], [], SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB + 5))
    sampled = sample(random_logits(1), [row])
    assert sampled.logprobs is not None
    assert sorted(sampled.logprobs.to_host()[0].token_ids[1:]) == list(range(VOCAB))


def test_a_row_without_a_candidate_gets_no_token() -> None:
    everything = tuple((token,) for token in range(VOCAB))
    rows = [
        SampledRow([1], [], SamplingParams(max_tokens=1, bad_words=everything, **limits))
        for limits in ({}, {"temperature": 0.0}, {"top_p": 0.5})
    ]
    assert sample(random_logits(3), rows).tokens.tolist() == [NO_TOKEN] * 3


def test_a_nucleus_that_reaches_top_p_exactly_takes_no_candidate_more() -> None:
    z = torch.tensor([[1.0, 0.5, 0.5]]).log()
    floors = nucleus_floors(z, torch.full((1, 1), -float("inf")), torch.tensor([[0.5]]))
    assert floors.tolist() == [[0.0]]


LIMITS: dict[str, dict[str, float]] = {
    "none": {},
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all limits": {"top_k": 14, "top_p": 0.9, "min_p": 0.03},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.4},
}


@pytest.mark.proof
@pytest.mark.parametrize("name", LIMITS)
def test_frequencies_follow_the_distribution(name: str) -> None:
    """Chi-square over 20,000 draws, which differ in the seed alone."""
    draws, vocab, first_seed = 20_000, 24, 100_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = [
        SampledRow(
            [1, 2, 2],
            [2, 5, 5, 5, 9],
            SamplingParams(max_tokens=9, seed=first_seed + i, **({"temperature": 0.9} | LIMITS[name])),
        )  # type: ignore[arg-type]
        for i in range(draws)
    ]
    probabilities = plain_probabilities(plain_logits(logits, rows[0]), rows[0].params)
    tokens = sampler_for(rows, vocab).sample(logits.expand(draws, vocab).contiguous(), sampled_rows(rows, vocab)).tokens
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    kept = probabilities > 0
    expected = probabilities[kept] * draws
    chi_square, degrees = float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1
    print(f"{name}: seeds {first_seed} to {first_seed + draws - 1}, chi-square {chi_square:.1f} at {degrees} degrees")
    assert counts[~kept].sum() == 0
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_the_memory_profiling_run_uses_every_stage() -> None:
    stages = (*logit_stages(1, 100, ()), penalties.Penalties(1))
    assert [type(stage).__name__ for stage in stages if not stage.uses(EVERY_FEATURE)] == []
    defaults = SamplingParams(max_tokens=1)
    unused = {
        name for name in SamplingParams.__struct_fields__ if getattr(EVERY_FEATURE, name) == getattr(defaults, name)
    }
    assert unused == {"max_tokens", "temperature", "seed", "choice", "ignore_eos", "stop_token_ids"}
