"""Define the interfaces of a decoder's parts, and of the operations of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


class HeadNorm(Protocol):
    """A normalization of x [..., heads, size] over the last dimension.

    Weight and bias are [size], or [heads, size] if each head has its own. The weight may be in
    float32 for inputs in 16 bits.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(HeadNorm, Protocol):
    """A normalization over the last dimension, with weight and bias [size]."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments may be overwritten."""
        ...


class RowNorm(Protocol):
    """Root-mean-square norms of a token's queries, all heads together, and of its keys."""

    eps: float

    @property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """Return the weights of queries and of keys; None if other ranks have a part of them."""
        ...

    def __call__(self, qkv: Tensor) -> None:
        """Norm the queries and keys of contiguous qkv [T, queries + 2 * keys] in place."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """The tokens of its row that a query attends to."""

    causal: bool = True
    # Causal: number of visible tokens, the query's own included. Otherwise the visible distance to
    # either side. None: all tokens
    window: int | None = None
    # Causal, in place of a window: tokens of a chunk; a query attends to its chunk up to itself
    chunk: int | None = None

    def __post_init__(self) -> None:
        assert self.chunk is None or (self.causal and self.window is None)

    @property
    def before(self) -> int | None:
        """Return how many tokens before its own a query attends to at most; None for all."""
        if self.chunk is not None:
            return self.chunk - 1
        return self.window - 1 if self.causal and self.window is not None else self.window

    @property
    def after(self) -> int | None:
        """Return how many tokens after its own a query attends to at most; None for all."""
        return 0 if self.causal else self.window


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer, on one rank if several share the model."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of query-key products
    pattern: AttentionPattern = AttentionPattern()
    kv_copies: int = 1  # ranks that have the same key-value heads
    soft_cap: float | None = None  # limit of scores: soft_cap * tanh(score / soft_cap)
    # The earlier layer whose keys and values it reads, which it neither computes nor stores
    reads: int | None = None

    @property
    def queries(self) -> int:
        """Return the numbers of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Return the numbers of a token's keys, as many as those of its values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """The preparation of queries and keys for attention: a norm over each head, if the model has
    one, before or after a rotation.
    """

    cos: Tensor  # [T, 1, d], from `Rotary.cos_sin`
    sin: Tensor
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    norm_after_rotation: bool = False


class AttentionContext(Protocol):
    """Attention of one step for the layers; it hides the paged cache and the step's rows."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k and v to the cache and compute attention; both are None for a layer that reads
        another's.

        q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]. `sinks`: see `AttentionPart`.
        """
        ...

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads, sinks: Tensor | None = None) -> Tensor:
        """Compute the same from qkv [T, heads + 2 * kv_heads, d], whose queries and keys are not
        yet normed and rotated; from queries [T, heads, d] alone for a layer that reads another's.
        """
        ...

    def check_interruption(self) -> None:
        """Raise StepAbandoned if the step must end for a live request."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The projections of a layer's attention. `query_norm`, `key_norm` and `value_norm` apply to
    each head, `row_norm` to all heads together and before the rotation.

    `sinks`, float32 [heads], has for each head a score without a value: the other weights of the
    softmax become smaller by it.
    """

    shape: AttentionShape
    qkv: Projection
    output: Projection
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    rotation: int = 0  # index of its rotation among the step's rotations
    norm_after_rotation: bool = False  # of heads
    row_norm: RowNorm | None = None
    value_norm: HeadNorm | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.sinks is None or (self.sinks.dtype == torch.float32 and self.sinks.is_contiguous())


@dataclass(frozen=True, slots=True)
class MlpPart:
    up: Projection  # includes its activation, and the gate if the family's MLP has one
    down: Projection


@dataclass(frozen=True, slots=True)
class LayerInputPart:
    """Weights of a layer's own input: the layer adds norm(projection(gate(x) * input))."""

    gate: Projection  # includes its activation
    projection: Projection
    norm: Norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: x + attention, then x + mlp, each of its normed input, and each result normed in
    turn where the family does so.

    With `parallel`, both parts read the layer's input. In a `post_norm` stack, `attention_norm` and
    `mlp_norm` apply to the sums.
    """

    attention: AttentionPart
    mlp: MlpPart
    attention_norm: Norm | None = None  # None for no norm
    mlp_norm: Norm | None = None  # if `parallel`, None for the result of `attention_norm`
    attention_result_norm: Norm | None = None
    mlp_result_norm: Norm | None = None
    parallel: bool = False
    factor: float = 1.0  # of the parts' results as they are added
    layer_input: LayerInputPart | None = None  # comes after the MLP
    scalar: Tensor | None = None  # [1], a factor of the layer's result with all that came before


class Stack(Protocol):
    """A sequence of layers."""

    def __call__(
        self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext, inputs: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [T, hidden] from embeddings [T, hidden], which may be overwritten.

        The next call may overwrite the result. Hidden states of tokens outside
        `StepAttention.needed` may be undefined. Without rotations, queries and keys are used
        unchanged. `inputs`, [T, layers, size], are those of layers with a `layer_input`.
        """
        ...


class Ops(Protocol):
    """The operations of a backend.

    It takes ownership of weights: a layer may store them in another layout, and the caller must not
    keep them. Norms apply to the last dimension and sum in float32; their weights may be in float32
    for inputs in 16 bits. A sum of `x` and `residual` is rounded to their dtype before the norm.
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

    def stack(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> Stack:
        """Return a stack of layers built with these operations; see `LayerStack`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm (Ba et al., 2016) of x [..., size], or without a bias its
        root-mean-square norm (Zhang and Sennrich, 2019).
        """
        ...

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Compute the root-mean-square norm of rows x [T, size], which may be apart, in place."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual itself.

        Both arguments may be overwritten.
        """
        ...
