"""Compute rotary position embeddings (Su et al., 2021), with the scalings of the supported
families' configs.

Formulas as in transformers' `modeling_rope_utils`. The tables are computed once and indexed by
position. Two kinds ("dynamic" NTK and "longrope") also depend on the request's length: a token's
length is that of its prompt or, for a generated token, its own position + 1, as transformers
applies it to a request that runs alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.base import HeadNorm, RotaryHeads
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.messages.errors import ModelLoadError


class Rotary:
    """Compute the rotations of a step.

    `cos_sin(positions [T], lengths [T])` returns the pair of [T, 1, head_dim] that `rotate` applies
    to every layer's heads.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._rotated, self._kept = config.rotated(head_dim), head_dim - config.rotated(head_dim)
        self._dtype = dtype
        frequencies, self._scale = inverse_frequencies(config, self._rotated, length=0)
        self._table = self._rotations(torch.arange(max_length), frequencies).to(device)
        self._long_table: Tensor | None = None
        if config.kind == "longrope" and max_length > config.unscaled_length:
            frequencies, _ = inverse_frequencies(config, self._rotated, length=config.unscaled_length + 1)
            self._long_table = self._rotations(torch.arange(max_length), frequencies).to(device)
        self._varies = config.depends_on_length and max_length > config.unscaled_length

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, 1, head_dim] in the model's dtype, from int64 [T] positions
        and lengths.

        The sine of the first half is negated.
        """
        rotations = self._table[positions]
        if self._varies:
            long = (lengths > self._config.unscaled_length).view(-1, 1, 1)
            rotations = torch.where(long, self._long_rotations(positions, lengths), rotations)
        cos, sin = rotations.unsqueeze(1).unbind(2)
        return cos, sin

    def _long_rotations(self, positions: Tensor, lengths: Tensor) -> Tensor:
        if self._long_table is not None:
            return self._long_table[positions]
        return self._rotations(positions, _dynamic_frequencies(self._config, self._rotated, lengths))

    def _rotations(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """Return [T, 2, head_dim] from positions [T] and frequencies [rotated / 2] or [T, rotated /
        2].
        """
        angles = positions[:, None].float() * frequencies.to(positions.device)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        if self._kept:
            cos, sin = F.pad(cos, (0, self._kept // 2), value=1.0), F.pad(sin, (0, self._kept // 2))
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(self._dtype)


class NoRotation:
    """The rotation of layers without positions, in the form of `Rotary`."""

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        kept = torch.ones(1, 1, head_dim, dtype=dtype, device=device)
        self._pair = kept, torch.zeros_like(kept)

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return a cosine of 1 and a sine of 0, [T, 1, head_dim]."""
        cos, sin = (each.expand(len(positions), -1, -1) for each in self._pair)
        return cos, sin


def prepare(x: Tensor, norm: HeadNorm | None, rotary: RotaryHeads) -> Tensor:
    """Return queries or keys x [T, heads, head_dim], normed and rotated, as a new tensor."""
    if norm is None:
        return rotate(x, rotary.cos, rotary.sin)
    if rotary.norm_after_rotation:
        return norm(rotate(x, rotary.cos, rotary.sin))
    return rotate(norm(x), rotary.cos, rotary.sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, head_dim] rotated by the pair of `Rotary.cos_sin`, as a new tensor."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)


def inverse_frequencies(config: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Return the frequencies [head_dim / 2] in float32 for a request of `length` tokens, and the
    factor of cosine and sine.
    """
    if config.kind == "dynamic":
        return _dynamic_frequencies(config, head_dim, torch.tensor([length]))[0], 1.0
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if config.kind == "proportional":
        turned = int(head_dim * config.rotated_share) // 2
        plain[turned:] = 0
        return plain / float(config.scaling.get("factor") or 1.0), 1.0
    if config.kind == "linear":
        return plain / float(config.scaling["factor"]), 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    if config.kind == "longrope":
        return _longrope(config, head_dim, length)
    return plain, 1.0


def _dynamic_frequencies(config: RopeConfig, head_dim: int, lengths: Tensor) -> Tensor:
    """Return frequencies [T, head_dim / 2] of NTK-aware scaling, whose base grows with each token's
    length.
    """
    factor = float(config.scaling["factor"])
    lengths = lengths.clamp(min=config.max_position_embeddings).float()
    growth = (factor * lengths / config.max_position_embeddings) - (factor - 1)
    base = config.theta * growth ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=lengths.device).float() / head_dim
    return 1.0 / base[:, None] ** exponents


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    scaling = config.scaling
    factor, low, high = (float(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Return YaRN's frequencies and factor (Peng et al., 2023): interpolated for slow dimensions,
    unchanged for fast ones, with a ramp between.
    """
    scaling = config.scaling
    original = int(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or config.max_position_embeddings / original)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_scale(config, factor)


def _yarn_scale(config: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given, numerator, denominator = (
        config.scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if given is not None:
        return float(given)
    if numerator and denominator:
        return mscale(float(numerator)) / mscale(float(denominator))
    return mscale(1.0)


def _longrope(config: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Return LongRoPE's frequencies and factor (Ding et al., 2024): searched factors per dimension,
    one set up to the original length and one beyond.
    """
    scaling = config.scaling
    original = int(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or config.max_position_embeddings / original)
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if length > original else "short_factor"
    factors = torch.tensor(scaling[name], dtype=torch.float32)
    if factors.shape != (head_dim // 2,):
        raise ModelLoadError(
            f"config.json has a {name} of {len(factors)} numbers for RoPE, but a head has {head_dim // 2} rotated pairs"
        )
    return 1.0 / (factors * config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)), float(scale)
