"""Bind a step's attention for the model's layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.attention.base import Attention, Metadata
from workers.engine.layers.base import AttentionShape, RotaryHeads
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


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's attention, its cache, and the index of its block table among a step's."""

    attention: Attention
    cache: Tensor
    shape: AttentionShape
    table: int = 0


def cached_layers(attention: Attention, shapes: Sequence[AttentionShape]) -> list[CachedLayer]:
    """Return layers with new caches and one attention for all."""
    caches = attention.new_cache(len(shapes))
    return [CachedLayer(attention, caches[keeping_layer(shapes, i)], shape) for i, shape in enumerate(shapes)]


def keeping_layer(shapes: Sequence[AttentionShape], layer: int) -> int:
    """Return the layer whose keys and values a layer reads: itself, or an earlier one."""
    reads = shapes[layer].reads
    return layer if reads is None else keeping_layer(shapes, reads)


@dataclass(slots=True)
class StepAttention:
    """The attention of one step: the layers, and the rows by each block table.

    `interruption` can end the step. All layers add `bias` to the scores of queries and keys that
    are not rotated.
    """

    layers: Sequence[CachedLayer]
    metadata: Sequence[Metadata]
    interruption: Interruption | None = None
    bias: Tensor | None = None  # see `Attention.forward`
    # The tokens whose hidden states are read, int64 in rising order; None for all. The hidden
    # states of other tokens may be undefined.
    needed: Tensor | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        self.check_interruption()
        its = self.layers[layer]
        return its.attention.forward(q, k, v, its.cache, self.metadata[its.table], its.shape, sinks, self.bias)

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads, sinks: Tensor | None = None) -> Tensor:
        self.check_interruption()
        its = self.layers[layer]
        return its.attention.forward_rotary(qkv, rotary, its.cache, self.metadata[its.table], its.shape, sinks)

    def check_interruption(self) -> None:
        if self.interruption is not None:
            self.interruption.check()
