"""Declare what a model's layers keep of earlier tokens, and divide the cache's pages among them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_Kind = tuple["CacheRule", tuple[int, ...]]  # a rule and a shape

CHUNK_TOKENS = 2048
"""The tokens in launched steps of one request for which windows have pages beside their own.

A longer chunk needs as many more, and is cut to the free ones.
"""

_MOST_PADDING = 0.05  # of all layers, and of a group that keeps all tokens


@dataclass(frozen=True, slots=True)
class CacheRule:
    """The earlier tokens that a layer reads: all, those in a window, or those of its chunk."""

    window: int | None = None  # tokens that a token reads, itself included
    chunk: int | None = None  # tokens of a chunk; a token reads its chunk up to itself

    @property
    def keeps_all(self) -> bool:
        return self.window is None and self.chunk is None

    def first_read(self, position: int) -> int:
        """Return the first token that the token at `position` reads."""
        if self.window is not None:
            return max(0, position + 1 - self.window)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of one layer."""

    rule: CacheRule
    token_bytes: int  # of one token's keys and values
    shape: tuple[int, ...]  # layers of one group have the same


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same rule and shape.

    The layers of a group are divided into columns of `layers_per_page` layers, the last of which
    may have fewer. A block of the grid takes `grid / block_size` pages in each column.
    """

    rule: CacheRule
    layers: tuple[int, ...]  # indices in the model, in rising order
    token_bytes: int  # of one layer
    block_size: int  # tokens of one page
    columns: int
    pages: int  # of one block of the grid, in all columns

    def most_blocks(self, grid: int) -> int:
        """Return the most blocks of the grid that hold what one token reads."""
        tokens = self.rule.window or self.rule.chunk
        return sys.maxsize if tokens is None else 1 + math.ceil((tokens - 1) / grid)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model, and how they divide pages.

    A page is the block of `layers_per_page` layers. A block of the grid has `grid` tokens.
    """

    groups: tuple[CacheGroup, ...]
    grid: int
    layers_per_page: int
    layer_bytes: int  # of one layer's part of a page

    @property
    def page_bytes(self) -> int:
        return self.layers_per_page * self.layer_bytes

    @property
    def columns(self) -> tuple[CacheGroup, ...]:
        """Return the group of each column, in the order of the block tables."""
        return tuple(group for group in self.groups for _ in range(group.columns))

    def places(self) -> dict[int, tuple[int, int]]:
        """Return the column of each layer that keeps something, and its place in a page."""
        places, first = {}, 0
        for group in self.groups:
            for index, layer in enumerate(group.layers):
                column, place = divmod(index, self.layers_per_page)
                places[layer] = first + column, place
            first += group.columns
        return places

    def request_pages(self, blocks: int, in_flight: int = 0) -> int:
        """Return the most pages of a request of so many blocks.

        Windows keep the blocks of launched steps, `in_flight`, too; a request that is alone goes on
        block by block.
        """
        return sum(group.pages * min(blocks, group.most_blocks(self.grid) + in_flight) for group in self.groups)

    @property
    def padding(self) -> float:
        """Return the share of the bytes of a block of all groups that no layer uses."""
        used = sum(len(group.layers) * group.token_bytes for group in self.groups) * self.grid
        return 1 - used / sum(group.pages * self.page_bytes for group in self.groups)


def group_layers(layers: Sequence[LayerCache | None], block_size: int) -> CacheGroups:
    """Return the groups of a model's layers; None for a layer that reads another's keys.

    Layers with the most bytes a token have blocks of `block_size` tokens, the others as many times
    more as fit. Of the ways to divide pages with little padding, this is the one with the fewest
    columns, then the least padding; without any, the one with the least padding.
    """
    kinds: dict[_Kind, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            kinds.setdefault((layer.rule, layer.shape), []).append(index)
    kept = [layer for layer in layers if layer is not None]
    token_bytes = {(layer.rule, layer.shape): layer.token_bytes for layer in kept}
    most = max(map(len, kinds.values()))
    sizes = [most] if len(kinds) == 1 else range(1, most + 1)
    ways = [_divide(kinds, token_bytes, block_size, size) for size in sizes]
    fits = [way for way in ways if _wastes_little(way)]
    if not fits:
        return min(ways, key=lambda way: way.padding)
    return min(fits, key=lambda way: (sum(group.columns for group in way.groups), way.padding))


def _divide(
    kinds: dict[_Kind, list[int]], token_bytes: dict[_Kind, int], block_size: int, layers_per_page: int
) -> CacheGroups:
    most = max(token_bytes.values())
    # A power of two, so that the grid is the longest block
    times = {kind: 1 << (most // size).bit_length() - 1 for kind, size in token_bytes.items()}
    grid = block_size * max(times.values())
    groups = []
    for kind, indices in kinds.items():
        columns, size = math.ceil(len(indices) / layers_per_page), block_size * times[kind]
        groups.append(CacheGroup(kind[0], tuple(indices), token_bytes[kind], size, columns, columns * (grid // size)))
    return CacheGroups(tuple(groups), grid, layers_per_page, block_size * most)


def _wastes_little(way: CacheGroups) -> bool:
    own = (
        1 - len(group.layers) / (group.columns * way.layers_per_page) for group in way.groups if group.rule.keeps_all
    )
    return max((way.padding, *own)) <= _MOST_PADDING
