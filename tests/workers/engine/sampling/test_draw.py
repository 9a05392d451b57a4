"""Limits and draws against the plain definition, down to ties, flat distributions and tiny
temperatures.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.sampling.masks import mask_of
from tests.workers.engine.sampling.plain import NOT_FINITE_ROWS, SampledRow, not_finite_rows, plain_token
from workers.engine.messages.core import SamplingParams
from workers.engine.sampling import draw, draw_cpu, limits
from workers.engine.sampling.draw import TorchDraw
from workers.engine.sampling.grammar_mask import apply_masks
from workers.engine.sampling.limits import nucleus_floors
from workers.engine.sampling.rows import SampledRows

VOCAB = 3000
GRAMMAR_LIMITS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1e-30},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 2900},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
]


def sample(logits: Tensor, params: list[SamplingParams], indices: list[int] | None = None) -> list[int]:
    """One token per row, row i in slot i."""
    stage = TorchDraw(len(params), logits.shape[1])
    for slot, row in enumerate(params):
        stage.set(slot, row)
    none = np.zeros(len(params), np.int64)
    rows = SampledRows(np.arange(len(params), dtype=np.int32), none, none + (indices or 0), torch.empty(0))
    return stage.tokens(logits.clone(), rows).tolist()


def random_logits(rows: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_is_the_argmax() -> None:
    logits = random_logits(4)
    assert sample(logits, [SamplingParams(max_tokens=1, temperature=0.0)] * 4) == logits.argmax(-1).tolist()


def test_tiny_temperature_is_the_argmax() -> None:
    logits = random_logits(4, scale=50.0)
    assert sample(logits, [SamplingParams(max_tokens=1, temperature=1e-30)] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p"), list(itertools.product([0, 1, 5, 400, 900, VOCAB, 10 * VOCAB], [1.0, 0.95, 0.5, 1e-6, 0.0]))
)
def test_equals_the_definition(top_k: int, top_p: float) -> None:
    logits = random_logits(6)
    params = [
        SamplingParams(
            max_tokens=9, temperature=0.5 + row / 8, top_k=top_k, top_p=top_p, seed=2**64 - 1 - row, choice=row % 3
        )
        for row in range(6)
    ]
    indices = list(range(6))
    expected = [plain_token(logits[row].double().numpy(), SampledRow([1], [1] * row, params[row])) for row in range(6)]
    assert sample(logits, params, indices) == expected


@pytest.mark.parametrize("allowed", [1, 2, 3, 40, VOCAB - 2])
@pytest.mark.parametrize("limits", GRAMMAR_LIMITS, ids=str)
def test_rows_of_which_a_grammar_allows_some_tokens(limits: dict[str, Any], allowed: int) -> None:
    """Also fewer than top_k keeps, and those that the model would hardly draw."""
    draw = np.random.default_rng(allowed)
    logits = random_logits(8, seed=allowed)
    masks = np.stack([mask_of(draw.permutation(VOCAB)[:allowed], VOCAB) for _ in range(8)])
    apply_masks(logits, np.arange(8), masks)
    params = [SamplingParams(9, seed=seed, **limits) for seed in range(8)]
    expected = [plain_token(logits[row].double().numpy(), SampledRow([1], [], params[row])) for row in range(8)]
    assert sample(logits, params) == expected


def test_mixed_rows_are_as_alone() -> None:
    """Every kind of row in one step; each gets what it gets in a step of its own."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 1700, "top_p": 0.99},
        {"temperature": 0.2, "top_p": 0.1},
    ]
    params = [SamplingParams(max_tokens=9, seed=row, **kinds[row % len(kinds)]) for row in range(64)]
    logits, indices = random_logits(64), [3 * row for row in range(64)]
    together = sample(logits, params, indices)
    alone = [sample(logits[row : row + 1], [params[row]], [indices[row]])[0] for row in range(64)]
    assert together == alone


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999])
def test_a_nucleus_ends_where_it_does_in_double_precision(scale: float, top_p: float) -> None:
    z = torch.randn(6, 30_000, generator=torch.Generator().manual_seed(1)) * scale
    z[1, 100:] = -torch.inf
    z[2, ::3] = z[2, 0]
    z[3] = z[3].round()
    z -= z.amax(-1, keepdim=True)
    floors = torch.tensor([-torch.inf, -torch.inf, -torch.inf, -torch.inf, -1.5, -0.2])[:, None]
    got = nucleus_floors(z, floors, torch.full((6, 1), top_p))
    for row in range(6):
        ordered = z[row].double().sort(descending=True).values
        weights = torch.where(ordered >= floors[row], ordered.exp(), 0)
        before = (weights.cumsum(0) - weights) / weights.sum()
        # The accuracy of the sums may move the end by a few candidates, never further.
        few = [ordered[(before < share) & (weights > 0)][-1] for share in (top_p + 2e-6, top_p - 2e-6)]
        assert few[0] - 1e-6 <= got[row] <= few[1] + 1e-6


def awkward_rows(scale: float) -> Tensor:
    """z [8, vocab] with ties, holes and rows of one value, the largest of each 0."""
    z = torch.randn(8, 30_000, generator=torch.Generator().manual_seed(2)) * scale
    z[1, 100:] = -torch.inf
    z[2, ::3] = z[2, 0]
    z[3] = z[3].round()
    z[4] = 1.0
    return z - z.amax(-1, keepdim=True)


@pytest.mark.parametrize(
    "candidates", [40.0, pytest.param(1.0, marks=pytest.mark.proof), pytest.param(0.01, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(0.01, marks=pytest.mark.proof),
        1.0,
        pytest.param(3.0, marks=pytest.mark.proof),
        pytest.param(30.0, marks=pytest.mark.proof),
    ],
)
def test_row_by_row_and_at_once_draw_the_same(scale: float, candidates: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where too few candidates are looked at first, and everything has to be."""
    monkeypatch.setattr(draw_cpu, "_CANDIDATES", candidates)
    monkeypatch.setattr(draw_cpu, "_BLOCK", 3)
    monkeypatch.setattr(draw, "_AT_ONCE", 3 * 30_000)
    z = awkward_rows(scale)
    for number, (top_p, floor) in enumerate(
        itertools.product([1.0, 0.97, 0.5, 0.1, 1e-3, 1e-9], [-np.inf, -30.0, -2.0, -0.4, 0.0])
    ):
        keys = torch.arange(8) * 12345 + number
        floors, shares = torch.full((8, 1), floor), torch.full((8, 1), top_p)
        at_once = draw.draw_on_device(z, floors, shares if top_p < 1 else None, keys)
        by_row = draw_cpu.draw_rows(
            z.numpy(), floors[:, 0].numpy(), shares[:, 0].numpy(), keys.numpy().view(np.uint64), 2
        )
        assert by_row.tolist() == at_once.tolist(), (top_p, floor)


@pytest.mark.parametrize("find", [limits.smallest_on_host, limits.smallest_on_device])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_smallest_of_the_largest(
    find: Callable[..., Tensor], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows with ties and holes and in ordered ones, of which a sample says little."""
    monkeypatch.setattr(limits, "AT_ONCE", 3 * 30_000)
    z = awkward_rows(scale)
    z[5] = z[5].sort().values
    z[6, ::25] = -50.0
    rows, expected = np.array([7, 1, 2, 3, 4, 5, 6]), z.sort(-1, descending=True).values
    for top_k in (np.full(7, k) for k in (1, 50, 700, 5000, 29_000, 29_999)):
        top_k[::3] = 40
        assert find(z, rows, top_k)[:, 0].tolist() == expected[rows, top_k - 1].tolist()


def test_one_row_s_large_top_k_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    topk = Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda z, k, dim: (found.append((len(z), k)), topk(z, k, dim))[1])
    monkeypatch.setattr(limits, "AT_ONCE", 4 * VOCAB)
    limits.smallest_on_device(random_logits(8), np.arange(8), np.array([5, 2000, 7, 5, 5, 5, 9, 5]))
    assert found == [(4, 5), (3, 9), (1, 2000)]


@pytest.mark.parametrize("top_k", [1, 3, 50, 20_000])
def test_what_is_ruled_out_is_not_partitioned(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of equal values that takes a hundred times as long."""
    partitioned: list[int] = []
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda a, kth: (partitioned.append(len(a)), partition(a, kth))[1])
    z = torch.full((1, 30_000), -torch.inf)
    z[0, [70, 7000, 20_000]] = torch.tensor([-1.0, 0.0, -2.0])
    found = limits.smallest_on_host(z, np.array([0]), np.array([top_k]))
    assert found.item() == {1: 0.0, 3: -2.0}.get(top_k, -np.inf)
    assert sum(partitioned) <= 3


def test_ties_at_the_threshold_are_all_kept() -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [5, 50, 500]] = 2.0
    drawn = {sample(logits, [SamplingParams(max_tokens=1, top_k=2, seed=seed)])[0] for seed in range(60)}
    assert drawn == {5, 50, 500}


@pytest.mark.parametrize("limits", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_without_finite_logits_say_so_beside_others(limits: dict[str, float]) -> None:
    rows = not_finite_rows(VOCAB)
    params = [SamplingParams(max_tokens=1, **limits)] * len(rows) + [SamplingParams(max_tokens=1, top_k=1)]  # type: ignore[arg-type]
    others = torch.full((1, VOCAB), -torch.inf)
    others[0, 8] = -3e38
    assert sample(torch.cat((rows, others)), params) == [*(expected for _, expected in NOT_FINITE_ROWS), 8]
