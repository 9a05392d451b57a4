"""The draw without a sort against the sorting one, and what it reads against what requests ask
for.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from tests.workers.engine.sampling.definition import noise, noise_bits
from tests.workers.engine.sampling.plain import NOT_FINITE_ROWS, SampledRow, not_finite_rows, random_row, sampled_rows
from workers.engine.cuda.staging import to_device
from workers.engine.kernels import sampling as kernels
from workers.engine.kernels.fused_draw import FusedDraw
from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.draw import TorchDraw, draw_on_device
from workers.engine.sampling.limits import SamplingLimits
from workers.engine.sampling.noise import request_keys, signed_seed
from workers.engine.sampling.sampler import Sampler

VOCAB = 700
# What is not a number stays so on a GPU without a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
LIMITS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-30},
    {"temperature": 0.6, "min_p": 0.05},
    {"top_k": 1},
    {"temperature": 0.7, "top_k": 20},
    {"top_k": 600},
    {"top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.9999},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 3.0, "top_k": 650, "top_p": 0.95},
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several parts of several blocks, more candidates than may be gathered."""
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    monkeypatch.setattr(kernels, "_PROGRAMS", 36)
    monkeypatch.setattr(kernels, "GATHERED", 64)


def asked(limits: Sequence[dict[str, Any]], seed: int = 0) -> list[SamplingParams]:
    draw = random.Random(seed)
    return [SamplingParams(9, seed=draw.getrandbits(64), choice=draw.randint(0, 3), **each) for each in limits]


def fused(params: Sequence[SamplingParams], vocab: int) -> Sampler:
    """Row i's parameters in slot i."""
    sampler = Sampler(len(params), vocab, FusedDraw(len(params), vocab, DEVICE))
    for slot, each in enumerate(params):
        sampler.set(slot, each)
    sampler.upload()
    return sampler


def drawn(logits: Tensor, params: Sequence[SamplingParams], first: int = 0) -> list[int]:
    """Tokens of rows that all draw the output's token `first` plus their own number, as a graph
    draws them.
    """
    rows = torch.arange(len(params), dtype=torch.int32, device=DEVICE)
    tokens = fused(params, logits.shape[1]).draw_static(
        logits.to(DEVICE), rows, rows + first + 7, torch.full_like(rows, 7)
    )
    assert tokens.dtype == torch.int32
    return tokens.tolist()


def sorted_draw(logits: Tensor, params: Sequence[SamplingParams], first: int = 0) -> list[int]:
    """What the reference draws."""
    logits, slots = logits.float().to(DEVICE), np.arange(len(params), dtype=np.int32)
    limits = SamplingLimits(len(params), logits.shape[1])
    for slot, each in enumerate(params):
        limits.set(slot, each)
    temperature = torch.tensor([each.temperature or 1.0 for each in params], device=DEVICE)
    z = logits.sub(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    words = np.array(
        [(signed_seed(each.seed), each.choice, first + row) for row, each in enumerate(params)], np.int64
    ).T
    keys = request_keys(*to_device(words.copy(), DEVICE))
    tokens = draw_on_device(z, limits.floors(z, slots), to_device(limits.top_p(slots), DEVICE)[:, None], keys).tolist()
    greedy = logits.argmax(-1).tolist()
    return [greedy[row] if each.temperature == 0 else tokens[row] for row, each in enumerate(params)]


def rows_of(kind: str, number: int, vocab: int, seed: int = 0) -> Tensor:
    logits = torch.randn(number, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "flat":
        return logits / 300
    if kind == "ties":
        return logits.round()
    if kind == "holes":
        logits[:, ::3] = -torch.inf
    if kind == "few":  # are allowed by a grammar
        ruled_out = torch.ones(vocab, dtype=torch.bool)
        ruled_out[torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:3]] = False
        logits[:, ruled_out] = -torch.inf
    return logits


@pytest.mark.proof
def test_equals_the_sorting_draw(small: None) -> None:
    params, logits = asked(LIMITS), rows_of("ties", len(LIMITS), VOCAB).to(torch.bfloat16)
    assert drawn(logits, params) == sorted_draw(logits, params)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "dtype", "gathered"),
    [
        ("plain", torch.float32, 1024),
        ("plain", torch.float16, 64),
        ("flat", torch.float32, 64),
        ("flat", torch.bfloat16, 1024),
        ("ties", torch.float32, 1024),
        ("holes", torch.float32, 64),
        ("holes", torch.bfloat16, 1024),
        ("few", torch.float32, 64),
    ],
)
def test_equals_the_sorting_draw_on_other_rows(
    kind: str, dtype: torch.dtype, gathered: int, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "GATHERED", gathered)
    params, logits = asked(LIMITS, seed=3), rows_of(kind, len(LIMITS), VOCAB, seed=gathered).to(dtype)
    assert drawn(logits, params, first=5) == sorted_draw(logits, params, first=5)


@pytest.mark.proof
def test_parts_of_a_row_change_nothing(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    params, logits = asked([LIMITS[1], LIMITS[7]]), rows_of("plain", 2, VOCAB)
    parted = drawn(logits, params)
    monkeypatch.setattr(kernels, "_PROGRAMS", 1)
    assert drawn(logits, params) == parted


@pytest.mark.parametrize("limits", [{"temperature": 0.0}, {}, {"top_k": 150, "top_p": 0.5}], ids=str)
def test_rows_without_finite_logits_say_so_beside_others(limits: dict[str, Any], small: None) -> None:
    logits = torch.cat((not_finite_rows(VOCAB), rows_of("plain", 1, VOCAB)))
    params = asked([limits] * len(logits))
    expected = [*(code for _, code in NOT_FINITE_ROWS), *drawn(logits[-1:], params[-1:], first=len(NOT_FINITE_ROWS))]
    assert drawn(logits, params) == expected


def test_the_draw_leaves_the_logits(small: None) -> None:
    logits = rows_of("plain", 2, VOCAB)
    before = logits.clone()
    drawn(logits, asked([{}, {"top_k": 5}]))
    assert torch.equal(logits, before)


@pytest.mark.proof
def test_all_stages_give_what_plain_torch_gives(small: None) -> None:
    """The stages before the draw, in a step whose rows ask for anything."""
    draw = random.Random("all stages")
    rows = [random_row(draw, VOCAB) for _ in range(6)]
    logits, batch = rows_of("plain", len(rows), VOCAB), sampled_rows(rows, VOCAB, DEVICE)
    sampled = []
    slots = 2 * len(rows) + 1
    for way in (TorchDraw(slots, VOCAB), FusedDraw(slots, VOCAB, DEVICE)):
        sampler = Sampler(slots, VOCAB, way, (3, 690))
        for number, row in enumerate(rows):
            sampler.set(2 * number + 1, row.params)
        sampler.upload()
        sampled.append(sampler.sample(logits.to(DEVICE, copy=True), batch))
    assert sampled[0].tokens.tolist() == sampled[1].tokens.tolist()


@pytest.mark.proof
def test_parameters_count_from_their_upload_on(small: None) -> None:
    logits, rows = torch.zeros(2, VOCAB, device=DEVICE), torch.arange(2, dtype=torch.int32, device=DEVICE)
    logits[:, 9] = 8.0
    sampler = Sampler(2, VOCAB, FusedDraw(2, VOCAB, DEVICE))

    def tokens() -> list[int]:
        return sampler.draw_static(logits, rows, rows, torch.zeros_like(rows)).tolist()

    assert tokens() == [9, 9]
    sampler.set(1, SamplingParams(1, temperature=50.0, seed=5))
    assert tokens() == [9, 9]
    sampler.upload()
    assert tokens()[0] == 9
    assert tokens()[1] != 9
    sampler.set(1, SamplingParams(1, temperature=0.0))
    sampler.upload()
    assert tokens() == [9, 9]


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": ((5, 1.0),)},
        {"bad_words": ((5,),)},
        {"allowed_token_ids": (5,)},
        {"min_tokens": 3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
    ],
)
def test_what_needs_stages(more: dict[str, Any]) -> None:
    sampler = fused(asked([{"top_k": 5, "top_p": 0.5, "min_p": 0.1}, more, {}]), VOCAB)
    assert sampler.needs_stages(np.array([0, 1, 2], np.int32)).tolist() == [False, True, False]
    sampler.set(1, SamplingParams(1))
    assert not sampler.needs_stages(np.array([0, 1], np.int32)).any()


@triton.jit
def _noise(table, lengths, tokens, bits, noises, COUNT: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, COUNT)
    its = kernels._noise_bits(kernels._key(table, row, lengths, None, row), tl.load(tokens + at))
    tl.store(bits + row * COUNT + at, its.to(tl.int64))
    tl.store(noises + row * COUNT + at, kernels._gumbel(its))


def test_noise_is_the_noise_of_every_device() -> None:
    seeds = (0, 1, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
    tokens = (0, 1, 2, 999, 50256, 151935, 2**31 - 2, 77)
    params = [SamplingParams(1, seed=seed, choice=number) for number, seed in enumerate(seeds)]
    table = fused(params, VOCAB)._draw._table
    lengths = torch.arange(len(seeds), dtype=torch.int32, device=DEVICE) * 20_000
    bits = torch.empty((len(seeds), len(tokens)), dtype=torch.int64, device=DEVICE)
    noises = torch.empty(bits.shape, dtype=torch.float32, device=DEVICE)
    _noise[(len(seeds),)](
        table,
        lengths,
        torch.tensor(tokens, dtype=torch.int32, device=DEVICE),
        bits,
        noises,
        len(tokens),
    )
    expected = [(seed, choice, 20_000 * choice) for choice, seed in enumerate(seeds)]
    assert bits.tolist() == [[noise_bits(*each, token) for token in tokens] for each in expected]
    exact = torch.tensor([[noise(*each, token) for token in tokens] for each in expected], dtype=torch.float64)
    assert (noises.cpu().double() - exact).abs().max() < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_real_shapes(scale: float, dtype: torch.dtype, rows: int) -> None:
    """Random weights make flat rows, trained ones peaked ones.

    Sums in another order may move a nucleus by its last candidate.
    """
    limits = [
        {},
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_k": 60_000},
    ]
    params = asked([limits[row % len(limits)] for row in range(rows)], seed=rows)
    logits = (torch.randn(rows, 151_936, device=DEVICE) * scale).to(dtype)
    differing = sum(a != b for a, b in zip(drawn(logits, params), sorted_draw(logits, params), strict=True))
    assert differing <= 1 + rows // 256


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [{}, {"top_k": 8}, {"top_p": 0.8}, {"top_k": 14, "top_p": 0.9, "min_p": 0.03}])
def test_frequencies_follow_the_distribution(limits: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws, which differ in the seed alone."""
    from tests.workers.engine.sampling.plain import plain_probabilities

    draws, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    params = [SamplingParams(9, seed=seed, **limits) for seed in range(draws)]
    probabilities = plain_probabilities(logits.double().numpy(), params[0])
    counts = np.bincount(drawn(logits.expand(draws, vocab).contiguous(), params), minlength=vocab)
    kept = probabilities > 0
    expected = probabilities[kept] * draws
    chi_square, degrees = float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1
    assert counts[~kept].sum() == 0
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.gpu
def test_sampling_does_not_wait_for_the_device() -> None:
    """Every stage and the draw, under a mode in which torch refuses to wait."""
    draw = random.Random("no waiting")
    rows = [random_row(draw, VOCAB) for _ in range(64)] + [SampledRow([1], [], SamplingParams(1))]
    logits, batch = rows_of("plain", len(rows), VOCAB).to(DEVICE), sampled_rows(rows, VOCAB, DEVICE)
    slots = 2 * len(rows) + 1
    for way in (TorchDraw(slots, VOCAB), FusedDraw(slots, VOCAB, DEVICE)):
        sampler = Sampler(slots, VOCAB, way, (3, 690))
        for number, row in enumerate(rows):
            sampler.set(2 * number + 1, row.params)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.upload()
            sampler.sample(logits.clone(), batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
