"""What the parts of a decoder are to each other, and what a backend computes them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.layers.quantized import Weight

Projection = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out]."""

Rotation = tuple[Tensor, Tensor]
"""`Rotary.cos_sin`'s pair."""


class Table(Protocol):
    """A matrix [vocab, hidden] as an embedding, as the output head, or as both where a model ties
    them.
    """

    def rows(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] in whichever float dtype they come."""
        ...


class Norm(Protocol):
    """A normalization over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments are used up."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Which tokens of its row a query sees."""

    causal: bool = True
    # Causal: tokens that a query sees, itself included. Otherwise the distance up to which it sees
    # tokens to either side. None: all of them
    window: int | None = None

    @property
    def before(self) -> int | None:
        """How many tokens before its own a query sees at most; None: all."""
        return self.window - 1 if self.causal and self.window is not None else self.window

    @property
    def after(self) -> int | None:
        """How many tokens behind its own a query sees at most; None: all."""
        return 0 if self.causal else self.window


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """What queries and keys go through before they attend: a norm over each head, where the model
    has one, then a rotation.
    """

    cos: Tensor  # [T, 1, d], as `Rotary.cos_sin` gives them
    sin: Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class AttentionContext(Protocol):
    """Attention of one step as the layers see it; it hides the paged cache and the step's rows."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]; writes k and v to the cache
        first.
        """
        ...

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        """Return the same from qkv [T, heads + 2 * kv_heads, d] whose queries and keys are yet to
        be normed and rotated.
        """
        ...

    def check_interruption(self) -> None:
        """Raise StepAbandoned where the step is to make way for a live request."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norms over heads are of queries and keys before they are rotated."""

    attention_norm: Norm | None  # None changes nothing
    qkv: Projection
    output: Projection
    mlp_norm: Norm
    up: Projection  # with its activation, and gated where the family's MLP is
    down: Projection
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotation: int = field(default=0, kw_only=True)  # which of the step's rotations is its own


Stack = Callable[[Tensor, Sequence[Rotation], AttentionContext], Tensor]
"""Embeddings [T, hidden], which are used up, -> [T, hidden], which the next call may use up; those
of tokens that are not `StepAttention.needed` may be undefined.

Without rotations, queries and keys attend as they are.
"""


class Ops(Protocol):
    """Weights are handed over: what is made of them may keep them in an order of its own, and the
    caller keeps none.

    Norms go over the last dimension and sum in float32. A sum of `x` and `residual` is rounded to
    their dtype before it is normed.
    """

    def linear(self, weight: Weight, bias: Tensor | None, activation: str | None = None) -> Projection:
        """x -> activation(x weight.T + bias) for weight [out, in].

        Raises ModelLoadError as `activation` does.
        """
        ...

    def gated_linear(self, weight: Weight, bias: Tensor | None, activation: str) -> Projection:
        """x -> activation(gate) * up, where x weight.T + bias [..., 2 * width] has the gates first.

        Raises as `linear`.
        """
        ...

    def table(self, weight: Weight) -> Table: ...

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        """Return whether products with a QuantizedWeight of so many bits are computed without
        dequantizing it, for inputs in a dtype. None: of no kind.
        """
        ...

    def multiplies_float8(self, device: torch.device) -> bool:
        """Return the same of a QuantizedWeight in float8."""
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
        """Return a stack out of layers that were made with these; `LayerStack` says how it runs."""
        ...

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm (Ba et al., 2016) of x [..., size], without a bias its
        root-mean-square norm (Zhang and Sennrich, 2019).
        """
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual itself.

        Neither argument is of use afterwards.
        """
        ...
