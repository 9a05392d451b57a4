"""Multiply queries by a factor that grows with the position (Llama 4, Ministral 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.layers.base import AttentionContext, RotaryHeads


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """The factor 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: int

    def applied(self, positions: Tensor, heads: int, attend: AttentionContext) -> AttentionContext:
        """Return attention for queries of `heads` heads at int64 [T] positions.

        This is `attend` if all factors are 1, which is not looked up on a GPU.
        """
        if positions.device.type == "cpu" and bool((positions < self.length).all()):
            return attend
        factors = 1 + self.beta * torch.log(1 + torch.floor(positions / self.length))
        return _TemperedAttention(attend, heads, factors.view(-1, 1, 1))


class _TemperedAttention:
    """Attention of queries times their factors [T, 1, 1]. Rotations do not change the factors."""

    def __init__(self, attend: AttentionContext, heads: int, factors: Tensor) -> None:
        self._attend, self._heads, self._factors = attend, heads, factors
        self.check_interruption = attend.check_interruption

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q * self._factors.to(q.dtype), k, v, sinks)

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads, sinks: Tensor | None = None) -> Tensor:
        assert rotary.query_norm is None
        qkv[:, : self._heads].mul_(self._factors.to(qkv.dtype))
        return self._attend.rotary(layer, qkv, rotary, sinks)
