"""Normalize over the last dimension, optionally fused with the preceding addition in a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.parallel import Shard
from workers.engine.layers.weights import Weights


class RMSNorm:
    """Root-mean-square norm whose factor is `offset` plus the checkpoint's weight.

    A sum is kept in float32, since `1 + weight` is not exact in 16 bits.
    """

    def __init__(self, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        weight = weights.take(f"{name}.weight", (size,))
        self.weight = weight.float() + offset if offset else weight
        self.bias: Tensor | None = None
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; both arguments may be overwritten."""
        return self._ops.add_norm(x, residual, self.weight, self.bias, self.eps)


class UnweightedNorm:
    """Root-mean-square norm of each head, without a weight."""

    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = torch.ones(size, dtype=weights.dtype, device=weights.device)
        self.bias: Tensor | None = None
        self.eps = eps
        self._ops = weights.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """Layer norm: RMS norm with mean subtraction and a bias, which is zero if the checkpoint has
    none.
    """

    def __init__(
        self, weights: Weights, name: str, size: int, eps: float, bias: bool = True, offset: float = 0.0
    ) -> None:
        super().__init__(weights, name, size, eps, offset)
        self.bias = weights.take(f"{name}.bias", (size,)) if bias else self.weight.new_zeros(size, dtype=weights.dtype)


class HeadLayerNorm:
    """Layer norm of each head by its own weight, without a bias.

    `names`: that of a tensor [heads, size], or those of a tensor [size] for each head. `heads` are
    this rank's. `order`, int64 [size], is that of a head's numbers, if they are permuted.
    """

    def __init__(
        self,
        weights: Weights,
        names: str | Sequence[str],
        heads: Shard,
        size: int,
        eps: float,
        order: Tensor | None = None,
    ) -> None:
        if isinstance(names, str):
            weight = weights.take(f"{names}.weight", (heads.total, size))[heads.where].contiguous()
        else:
            weight = torch.stack([weights.take(f"{name}.weight", (size,)) for name in names[heads.where]])
        self.weight = weight if order is None else weight[:, order.to(weight.device)].contiguous()
        self.bias: Tensor | None = torch.zeros_like(weight)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)


class RowRMSNorm:
    """Root-mean-square norms of a token's queries, all heads of all ranks together, and of its
    keys.

    `names` and `rows` are those of queries and keys; `copies` ranks have the same keys.
    """

    def __init__(
        self, weights: Weights, names: Sequence[str], rows: Sequence[Shard], eps: float, copies: int = 1
    ) -> None:
        self._queries, self._keys = (
            weights.take_rows([f"{name}.weight"], [part]) for name, part in zip(names, rows, strict=True)
        )
        self._ops, self._parallel, self.eps = weights.ops, weights.parallel, eps
        self._totals = torch.tensor([rows[0].total, rows[1].total * copies], device=weights.device)

    @property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """Return the weights of queries and of keys; None if other ranks have a part of them."""
        return (self._queries, self._keys) if self._parallel.size == 1 else None

    def __call__(self, qkv: Tensor) -> None:
        """Norm the queries and keys of contiguous qkv [T, queries + 2 * keys] in place."""
        weights = self._queries, self._keys
        parts = qkv.tensor_split([len(self._queries), len(self._queries) + len(self._keys)], 1)[:2]
        if self._parallel.size == 1:
            for x, weight in zip(parts, weights, strict=True):
                self._ops.norm_in_place(x, weight, self.eps)
            return
        squares = torch.stack([x.float().square().sum(1) for x in parts], 1)
        factors = (self._parallel.all_reduce(squares) / self._totals + self.eps).rsqrt().unbind(1)
        for x, weight, factor in zip(parts, weights, factors, strict=True):
            x.copy_(x.float() * factor[:, None] * weight.float())
