"""Bind a step's attention for the model's layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.attention.base import Attention, Metadata
from workers.engine.layers.base import AttentionPattern, RotaryHeads
from workers.engine.messages.errors import StepAbandoned


class Interruption:
    """A flag with which another thread ends a running step at its next layer."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)

    def set(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    @property
    def address(self) -> int:
        """Return the address of the flag for native code; its value is not 0 once it is set."""
        return ctypes.addressof(self._flag)

    def check(self) -> None:
        """Raise StepAbandoned if the flag is set."""
        if self._flag.value:
            raise StepAbandoned("a live request has arrived")


@dataclass(slots=True)
class StepAttention:
    """The attention of one step: a backend, each layer's cache, scale and pattern, and the rows.

    `interruption` can end the step. All layers add `bias` to the scores of queries and keys that
    are not rotated.
    """

    attention: Attention
    caches: list[Tensor]
    metadata: Metadata
    scales: Sequence[float]
    patterns: Sequence[AttentionPattern]
    interruption: Interruption | None = None
    bias: Tensor | None = None  # see `Attention.forward`
    # The tokens whose hidden states are read, int64 in rising order; None for all. The hidden
    # states of other tokens may be undefined.
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
