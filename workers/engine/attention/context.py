"""A step's attention as the model's layers call it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.attention.base import Attention, Metadata
from workers.engine.layers.base import AttentionPattern, RotaryHeads
from workers.engine.messages.errors import StepAbandoned


class Interruption:
    """A flag by which another thread lets a running step end at its next layer."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)

    def set(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    @property
    def address(self) -> int:
        """Where native code reads it; not 0 once it is set."""
        return ctypes.addressof(self._flag)

    def check(self) -> None:
        """Raise StepAbandoned if the flag is set."""
        if self._flag.value:
            raise StepAbandoned("a live request has arrived")


@dataclass(slots=True)
class StepAttention:
    """A backend, each layer's cache, scale and pattern, one step's rows, what may end it, and what
    all layers add to the scores of queries and keys that are not rotated.
    """

    attention: Attention
    caches: list[Tensor]
    metadata: Metadata
    scales: Sequence[float]
    patterns: Sequence[AttentionPattern]
    interruption: Interruption | None = None
    bias: Tensor | None = None  # as `Attention.forward` has it
    # The tokens whose hidden states are read, int64 in rising order; None for all. Those of others
    # may be undefined.
    needed: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.check_interruption()
        return self.attention.forward(
            q, k, v, self.caches[layer], self.metadata, self.scales[layer], self.patterns[layer], self.bias
        )

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        self.check_interruption()
        return self.attention.forward_rotary(
            qkv, rotary, self.caches[layer], self.metadata, self.scales[layer], self.patterns[layer]
        )

    def check_interruption(self) -> None:
        if self.interruption is not None:
            self.interruption.check()
