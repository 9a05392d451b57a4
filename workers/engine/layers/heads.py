"""Find the rows of attention heads in a checkpoint's matrices, in the order of the engine's
rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.layers.parallel import Parallel, Shard


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Rows of a tensor of `total` rows, in any order; otherwise like a `Shard`."""

    where: Tensor  # int64
    total: int

    @property
    def length(self) -> int:
        return len(self.where)

    def select(self, where: slice) -> Tensor:
        """Return some of these rows as rows of the checkpoint."""
        return self.where[where]


Rows = Shard | PickedRows


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The place of `heads` heads of `head_dim` rows in a tensor of `total` rows: the first row, and
    the rows from one head to the next.
    """

    heads: int
    head_dim: int
    first: int
    stride: int
    total: int

    def on_rank(self, parallel: Parallel, copies: int = 1, order: Tensor | None = None) -> Rows:
        """Return a rank's rows of these heads, if `copies` ranks have the same ones, each head's in
        `order`.
        """
        heads = parallel.shard(self.heads * copies // parallel.size, copies)
        if order is None and self.stride == self.head_dim:
            start, length = heads.start * self.head_dim, heads.length * self.head_dim
            return Shard(self.first + start, length, self.total)
        within = torch.arange(self.head_dim) if order is None else order
        firsts = self.first + torch.arange(heads.start, heads.start + heads.length) * self.stride
        return PickedRows((firsts[:, None] + within).flatten(), self.total)


def separate(heads: int, kv_heads: int, head_dim: int) -> list[HeadRows]:
    """Return the places of queries, keys and values that have a tensor each."""
    return [HeadRows(count, head_dim, 0, head_dim, count * head_dim) for count in (heads, kv_heads, kv_heads)]


def side_by_side(heads: int, kv_heads: int, head_dim: int) -> list[HeadRows]:
    """Return the places in one tensor: all queries, then all keys, then all values."""
    total, firsts = (heads + 2 * kv_heads) * head_dim, (0, heads, heads + kv_heads)
    counts = heads, kv_heads, kv_heads
    places = zip(counts, firsts, strict=True)
    return [HeadRows(count, head_dim, first * head_dim, head_dim, total) for count, first in places]


def by_head(heads: int, kv_heads: int, head_dim: int) -> list[HeadRows]:
    """Return the places in one tensor that has each head's query, key and value together."""
    assert heads == kv_heads
    return [HeadRows(heads, head_dim, part * head_dim, 3 * head_dim, 3 * heads * head_dim) for part in range(3)]


def rotary_order(head_dim: int, rotated: int, interleaved: bool) -> Tensor | None:
    """Return the order, int64 [head_dim], in which a head's numbers pair up like those of a half
    rotation of the whole head; None if they do already.

    `rotated` is the number of first numbers that are rotated: in pairs side by side if
    `interleaved`, else of their first and second half.
    """
    if rotated == head_dim and not interleaved:
        return None
    turned, rest = torch.arange(rotated), torch.arange(rotated, head_dim)
    first, second = (turned[0::2], turned[1::2]) if interleaved else turned.chunk(2)
    kept_first, kept_second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return torch.cat((first, kept_first, second, kept_second))
