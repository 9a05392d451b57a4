"""Which tiles the attention kernel works in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.attention import CacheShape


@dataclass(frozen=True, slots=True)
class Choice:
    """How `attend` is compiled for one kind of step."""

    block_m: int  # rows of the matrix tile: queries times heads of a group
    tile: int  # keys at once
    warps: int
    stages: int  # of loads under way
    peeled: bool  # tiles that need no mask have a loop of their own


def choices(shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> dict[str, Choice]:
    """For "decode" (one token a row) and "prefill"."""
    group = 1 << (num_heads // shape.kv_heads - 1).bit_length()
    return {"decode": Choice(max(16, group), 64, 4, 3, False), "prefill": Choice(max(128, group), 64, 8, 3, True)}
