"""Define the interfaces of a decoder's parts, and of the operations of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.layers.quantized import Weight
from workers.engine.layers.stored_matrix import StoredMatrix

Projection = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out]."""

Rotation = tuple[Tensor, Tensor]
"""`Rotary.cos_sin`'s pair."""


class Table(Protocol):
    """A matrix [vocab, hidden] as an embedding, as the output head, or as both if a model ties
    them.
    """

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows [T, hidden] for int64 [T] indices."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab] for hidden states [R, hidden], in any float dtype."""
        ...


class Norm(Protocol):
    """A normalization over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """The tokens of its row that a query attends to."""

    causal: bool = True
    # Causal: number of visible tokens, the query's own included. Otherwise the visible distance to
    # either side. None: all tokens
    window: int | None = None

    @property
    def before(self) -> int | None:
        """Return how many tokens before its own a query attends to at most; None for all."""
        return self.window - 1 if self.causal and self.window is not None else self.window

    @property
    def after(self) -> int | None:
        """Return how many tokens after its own a query attends to at most; None for all."""
        return 0 if self.causal else self.window


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """The preparation of queries and keys for attention: a norm over each head, if the model has
    one, then a rotation.
    """

    cos: Tensor  # [T, 1, d], from `Rotary.cos_sin`
    sin: Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class AttentionContext(Protocol):
    """Attention of one step for the layers; it hides the paged cache and the step's rows."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v to the cache and compute attention.

        q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d].
        """
        ...

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        """Compute the same from qkv [T, heads + 2 * kv_heads, d], whose queries and keys are not
        yet normed and rotated.
        """
        ...

    def check_interruption(self) -> None:
        """Raise StepAbandoned if the step must end for a live request."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The parts of one layer. `query_norm` and `key_norm` apply to each head before the
    rotation.
    """

    attention_norm: Norm | None  # None for no norm
    qkv: Projection
    output: Projection
    mlp_norm: Norm
    up: Projection  # includes its activation, and the gate if the family's MLP has one
    down: Projection
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotation: int = field(default=0, kw_only=True)  # index of its rotation among the step's rotations


Stack = Callable[[Tensor, Sequence[Rotation], AttentionContext], Tensor]
"""Computes hidden states [T, hidden] from embeddings [T, hidden], which may be overwritten.

The next call may overwrite the result. Hidden states of tokens outside `StepAttention.needed` may
be undefined. Without rotations, queries and keys are used unchanged.
"""


class Ops(Protocol):
    """The operations of a backend.

    It takes ownership of weights: a layer may store them in another layout, and the caller must not
    keep them. Norms apply to the last dimension and sum in float32. A sum of `x` and `residual` is
    rounded to their dtype before the norm.
    """

    def linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str | None = None) -> Projection:
        """Return x -> activation(x weight.T + bias) for weight [out, in].

        Raises ModelLoadError like `activation`.
        """
        ...

    def gated_linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str) -> Projection:
        """Return x -> activation(gate) * up, where x weight.T + bias [..., 2 * width] has the gates
        first.

        Raises like `linear`.
        """
        ...

    def table(self, weight: Weight | StoredMatrix) -> Table: ...

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        """Return whether products with a QuantizedWeight of this many bits need no dequantization,
        for inputs of a dtype. `bits` is None for weights of no such kind.
        """
        ...

    def multiplies_float8(self, device: torch.device) -> bool:
        """Return the same for a QuantizedWeight in float8."""
        ...

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        post_norm: bool = False,
    ) -> Stack:
        """Return a stack of layers built with these operations; see `LayerStack`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm (Ba et al., 2016) of x [..., size], or without a bias its
        root-mean-square norm (Zhang and Sennrich, 2019).
        """
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual itself.

        Both arguments may be overwritten.
        """
        ...
