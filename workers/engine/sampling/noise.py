"""Sampling noise as a pure function of (seed, choice, output index, token), so that a request's
tokens depend on nothing else.

The integer part is exact and the same everywhere, in 64-bit arithmetic that wraps:

    mix(z)  = SplitMix64's finalizer (Steele, Lea, Flood, 2014; constants of Stafford's variant 13)
    key     = mix(mix(mix(seed + G) + choice * G) + index * G)
    bits    = mix(key + (token + 1) * G) >> 32
    v       = min(float32(bits) * 2^-32 + 2^-33, 1 - 2^-24), each step in float32
    noise   = -log(-log1p(-v))                        (standard Gumbel)

`v` is one minus the uniform of the textbook formula: floats are dense near 0, which is where the
winning noise comes from.
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LARGEST = 1.0 - 2.0**-24
_HIGH = int(sys.byteorder == "little")  # index of the upper half of a 64-bit number in memory


def request_keys(seeds: Tensor, choices: Tensor, indices: Tensor) -> Tensor:
    """Return the key of each row's next token; all are int64 [R], seeds in two's complement."""
    golden = _signed(GOLDEN)
    key = _mix(seeds + golden)
    key = _mix(key.add_(choices * golden))
    return _mix(key.add_(indices * golden))


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return noise in float32, of the shape to which int64 `keys` and `tokens` broadcast."""
    bits = _mix(keys + (tokens + 1) * _signed(GOLDEN))
    bits = bits.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    v = bits.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=_LARGEST)
    return v.neg_().log1p_().neg_().log_().neg_()


def token_steps(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the amount that each token adds to a key; the host's noise starts from it."""
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)


@cache
def vocabulary_steps(vocab: int) -> NDArray[np.uint64]:
    """Return the same for a whole vocabulary."""
    return token_steps(np.arange(vocab))


def rough_bits(keys: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return the bits behind the noise as floats; the last bit may be wrong.

    The shape is that to which keys and steps broadcast.
    """
    return _mixed_up(steps + keys).view(np.uint32)[..., _HIGH::2].astype(np.float32)


def host_gumbel(key: np.uint64, steps: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return the noise of one row, [C] like the steps."""
    z = _mixed_up(steps + key)
    z ^= z >> np.uint64(31)
    v = (z >> np.uint64(32)).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    noise: NDArray[np.float32] = -np.log(-np.log1p(-np.minimum(v, np.float32(_LARGEST))))
    return noise


def signed_seed(seed: int) -> int:
    """Return a 64-bit unsigned seed as the int64 with the same bits."""
    return _signed(seed & _MASK)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(z: Tensor) -> Tensor:
    """Apply `mix` in place. int64 shifts keep the sign, so the shifted-in copies are masked off."""
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _signed(MIX_1)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(MIX_2)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def _mixed_up(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `mix` in place, without its last step."""
    other = z >> np.uint64(30)
    z ^= other
    z *= np.uint64(MIX_1)
    np.right_shift(z, np.uint64(27), out=other)
    z ^= other
    z *= np.uint64(MIX_2)
    return z
