"""A step's attention as the model's layers call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.attention.base import Attention, Metadata
from workers.engine.layers.base import RotaryHeads


@dataclass(slots=True)
class StepAttention:
    """A backend, each layer's cache, scale and window, and one step's rows."""

    attention: Attention
    caches: list[Tensor]
    metadata: Metadata
    scales: Sequence[float]
    windows: Sequence[int | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.forward(
            q, k, v, self.caches[layer], self.metadata, self.scales[layer], self.windows[layer]
        )

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        return self.attention.forward_rotary(
            qkv, rotary, self.caches[layer], self.metadata, self.scales[layer], self.windows[layer]
        )
