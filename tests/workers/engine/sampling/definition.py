"""The noise as its definition has it, one token at a time, in plain Python."""

import math

from workers.engine.sampling.noise import GOLDEN, MIX_1, MIX_2

_MASK = (1 << 64) - 1
_LARGEST = 1.0 - 2.0**-24


def noise_bits(seed: int, choice: int, index: int, token: int) -> int:
    """Return the 32 bits behind one token's noise, in plain Python."""
    key = _mix_int(seed + GOLDEN)
    key = _mix_int(key + choice * GOLDEN)
    key = _mix_int(key + index * GOLDEN)
    return _mix_int(key + (token + 1) * GOLDEN) >> 32


def noise(seed: int, choice: int, index: int, token: int) -> float:
    """Return one token's noise, in plain Python and double precision."""
    v = min(noise_bits(seed, choice, index, token) * 2.0**-32 + 2.0**-33, _LARGEST)
    return -math.log(-math.log1p(-v))


def _mix_int(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)
