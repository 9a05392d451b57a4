"""The noise is the same integers everywhere, and is distributed as it should be."""

import math

import numpy as np
import pytest
import torch

from tests.workers.engine.sampling.definition import noise, noise_bits
from workers.engine.sampling.noise import (
    gumbel,
    host_gumbel,
    request_keys,
    rough_bits,
    signed_seed,
    token_steps,
)

SEEDS = (0, 1, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1)


def test_constants_are_fixed() -> None:
    """Stored seeds must give the same tokens in every later release."""
    assert noise_bits(0, 0, 0, 0) == 0x2CE809AE
    assert noise_bits(42, 0, 7, 50256) == 0x0617CFD9
    assert noise_bits(2**64 - 1, 3, 1000, 151935) == 0xD5A53590


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_equal_plain_python(seed: int) -> None:
    tokens = torch.tensor([0, 1, 2, 999, 50256, 151935, 2**31 - 1])
    for choice, index in ((0, 0), (1, 0), (0, 1), (127, 100_000)):
        keys = request_keys(torch.tensor([signed_seed(seed)]), torch.tensor([choice]), torch.tensor([index]))
        drawn = gumbel(keys[:, None], tokens)[0]
        expected = torch.tensor([noise(seed, choice, index, int(token)) for token in tokens], dtype=torch.float64)
        assert (drawn.double() - expected).abs().max() < 2e-5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hosts_half_equals_plain_python(seed: int) -> None:
    tokens = np.array([0, 1, 2, 999, 50256, 151935, 2**31 - 1])
    for choice, index in ((0, 0), (1, 0), (0, 1), (127, 100_000)):
        keys = request_keys(torch.tensor([signed_seed(seed)]), torch.tensor([choice]), torch.tensor([index]))
        key, steps = keys.numpy().view(np.uint64)[0], token_steps(tokens)
        expected = [noise(seed, choice, index, int(token)) for token in tokens]
        assert np.abs(host_gumbel(key, steps) - expected).max() < 2e-5
        bits = np.array([noise_bits(seed, choice, index, int(token)) for token in tokens], np.float64)
        assert (np.abs(rough_bits(np.array([key]), steps) - bits) <= 1 + bits * 2.0**-24).all()


def test_shape_does_not_matter() -> None:
    """A candidate's noise is the same alone as among a whole vocabulary."""
    keys = request_keys(torch.arange(5), torch.zeros(5, dtype=torch.int64), torch.arange(5))
    whole = gumbel(keys[:, None], torch.arange(1000))
    rows, tokens = torch.tensor([4, 0, 2]), torch.tensor([999, 0, 17])
    assert torch.equal(gumbel(keys[rows], tokens), whole[rows, tokens])


def test_inputs_are_left_alone() -> None:
    seeds, choices, indices, tokens = torch.tensor([7]), torch.tensor([1]), torch.tensor([2]), torch.tensor([3])
    keys = request_keys(seeds, choices, indices)
    kept = keys.clone()
    gumbel(keys, tokens)
    assert (seeds.item(), choices.item(), indices.item(), tokens.item()) == (7, 1, 2, 3)
    assert torch.equal(keys, kept)


def test_follows_the_gumbel_distribution() -> None:
    keys = request_keys(torch.arange(200), torch.zeros(200, dtype=torch.int64), torch.zeros(200, dtype=torch.int64))
    drawn = gumbel(keys[:, None], torch.arange(2000)).flatten()
    assert torch.isfinite(drawn).all()
    assert drawn.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert drawn.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-1.0, 0.0, 1.0, 3.0, 6.0):
        assert (drawn < x).float().mean().item() == pytest.approx(math.exp(-math.exp(-x)), abs=0.003)


def test_neighbors_are_independent() -> None:
    """Seeds, choices, indices and tokens that differ by one give unrelated noise."""
    count = 20_000
    zeros, steps = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    for keys, tokens in (
        (request_keys(steps, zeros, zeros), zeros),
        (request_keys(zeros, steps, zeros), zeros),
        (request_keys(zeros, zeros, steps), zeros),
        (request_keys(zeros, zeros, zeros), steps),
    ):
        drawn = gumbel(keys, tokens)
        assert torch.corrcoef(torch.stack((drawn[:-1], drawn[1:])))[0, 1].abs() < 0.03
