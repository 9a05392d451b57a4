"""Manage the paged KV cache of a model whose layers form several groups, or one with a window."""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.cache_groups import CHUNK_TOKENS, CacheGroups
from workers.engine.messages.step import NewBlocks
from workers.engine.scheduling.cache import SchedulerCache
from workers.engine.scheduling.kv_cache import KVCache, hash_blocks, hash_prefix
from workers.engine.scheduling.page_pool import PagePool
from workers.engine.scheduling.prefix_tree import BlockRun, PageBlock, PrefixNode, PrefixTree
from workers.engine.scheduling.request import RequestState


def make_cache(
    groups: CacheGroups, num_pages: int, most_in_flight: int, *, enable_prefix_caching: bool
) -> SchedulerCache:
    """Return the cache of a model with these groups.

    `most_in_flight` is the number of tokens of all launched steps.
    """
    if len(groups.groups) == 1 and groups.groups[0].rule.keeps_all:
        return KVCache(num_pages, groups.grid, enable_prefix_caching)
    return HybridKVCache(groups, num_pages, most_in_flight, enable_prefix_caching)


class HybridKVCache:
    """Allocate pages to the blocks of all groups, and find prefixes that each group has.

    A block has the tokens of the grid in every group, and takes as many pages as the group has
    there. A request has a `BlockRun` in each group, from the block of the last border that needs
    one: the border of the tokens that are computed for certain, so that it can go on from there
    after a step was undone, after a preemption, or in a follow-up.

    Anchors (`prefix_tree.py`) are the last border of a prompt and of a request that leaves, a
    border that was hit, and one where prompts part: a waiting request has the same tokens up to
    there, or the request itself has more in common with a cached prefix than the border that it
    began from.
    """

    def __init__(
        self, groups: CacheGroups, num_pages: int, most_in_flight: int, enable_prefix_caching: bool = True
    ) -> None:
        """Take `num_pages` pages, the null page included.

        `most_in_flight` is the number of tokens of all launched steps.
        """
        size = groups.grid
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree([group.rule for group in groups.groups], size, self.pool)
        self.num_pages = num_pages
        self.block_size = size
        self.enable_prefix_caching = enable_prefix_caching
        self._pages = [group.pages for group in groups.groups]
        self._full = [index for index, group in enumerate(groups.groups) if group.rule.keeps_all]
        self._full_pages = sum(self._pages[index] for index in self._full)
        self._windows = [index for index, group in enumerate(groups.groups) if not group.rule.keeps_all]
        windows = [groups.groups[index] for index in self._windows]
        self._spans = [(group.pages, group.most_blocks(size)) for group in windows]
        self._blocks_in_flight = -(-min(most_in_flight, CHUNK_TOKENS) // size)
        self.block_pages = sum(self._pages)
        self.frees_old_blocks = bool(self._windows)
        self.max_tokens = self._most_tokens()
        if self.max_tokens < 1:
            raise ValueError(f"the KV cache needs at least {self.block_pages + 1} pages, got {num_pages}")

    def find_prefix(self, request: RequestState) -> list[PrefixNode | None]:
        if not self.enable_prefix_caching:
            return []
        full = hash_prefix(request, self.block_size)
        nodes = self.tree.match(request.block_hashes[:full])
        depth = self.tree.longest_border(nodes)
        request.branch = len(nodes) if self._full and depth < len(nodes) else 0
        return nodes[:depth]

    def count_free(self, prefix: Sequence[PrefixNode | None]) -> int:
        pages = 0
        for group, size in enumerate(self._pages):
            if group in self._windows:
                free = sum(_is_free(node, group) for node in prefix[self.tree.first_block(group, len(prefix)) :])
            else:  # a request that uses a block uses those before it too
                free = len(prefix) - bisect_left(prefix, True, key=partial(_is_free, group=group))
            pages += free * size
        return pages

    def retain(self, request: RequestState) -> None:
        if self.enable_prefix_caching:
            full = hash_prefix(request, self.block_size)
            self.tree.retain(request.id, request.block_hashes[:full])

    def release(self, request: RequestState) -> None:
        self.tree.release(request.id)

    def admit(self, request: RequestState, prefix: Sequence[PrefixNode | None]) -> None:
        request.runs = self._runs(prefix)
        for run in request.runs:
            for block in run.blocks:
                self.tree.touch(block)
        request.pages_held = self._count_pages(request)
        request.shared = self.shared_pages(prefix)
        request.computed = request.capacity = len(prefix) * self.block_size
        request.hash_at = request.computed + self.block_size if self.enable_prefix_caching else sys.maxsize
        request.release_at = request.computed + self.block_size if self._windows else sys.maxsize
        if prefix:
            request.shared_border = self.tree.add_anchor(request.block_hashes, len(prefix), request.live)

    def held_blocks(self, request: RequestState) -> list[NewBlocks]:
        return [
            NewBlocks(request.slot, run.first, [page for block in run.blocks for page in block.pages], group)
            for group, run in enumerate(request.runs)
            if run.blocks
        ]

    def reach(self, request: RequestState, end: int) -> tuple[int, int]:
        size, capacity = self.block_size, request.capacity
        blocks = min(self._blocks_for(end - capacity), self.pool.num_free // self.block_pages)
        if not blocks and capacity == request.computed:
            blocks = 1
        return min(end, capacity + blocks * size), blocks * self.block_pages

    def grow(self, request: RequestState, end: int) -> list[NewBlocks]:
        count = self._blocks_for(end - request.capacity)
        pages, new, at = self.tree.allocate(count * self.block_pages), [], 0
        for group, run in enumerate(request.runs):
            size = self._pages[group]
            ids = pages[at : at + count * size]
            at += len(ids)
            new.append(NewBlocks(request.slot, run.end, ids, group))
            run.blocks += [PageBlock(group, ids[first : first + size]) for first in range(0, len(ids), size)]
        request.pages_held += len(pages)
        request.capacity += count * self.block_size
        return new

    def cache_blocks(self, request: RequestState) -> None:
        size = self.block_size
        full = min(request.computed, len(request.tokens)) // size
        first = request.hash_at // size - 1
        request.hash_at = (max(first, full) + 1) * size
        if full <= first:
            return
        hash_blocks(request, full, size)
        if not self._attach(request, first, full):
            request.hash_at = sys.maxsize
            return
        for depth in range(first + 1, full + 1):
            if depth == (request.prompt_length - 1) // size:
                self.tree.add_anchor(request.block_hashes, depth, request.live)
            if depth == request.branch or self.tree.parts(request.block_hashes, depth):
                anchor = self.tree.add_anchor(request.block_hashes, depth, request.live)
                request.shared_border = anchor or request.shared_border

    def _attach(self, request: RequestState, first: int, full: int) -> bool:
        """Cache blocks `first` to `full` - 1, and those before that have left the cache.

        Return False if one of them may not be cached.
        """
        while first and any(block.node is None for block in _blocks_at(request, first - 1)):
            first -= 1
        for index in range(first, full):
            blocks = _blocks_at(request, index)
            if any(block.barred for block in blocks):
                return False
            if blocks:
                self.tree.attach(request.block_hashes, index, blocks)
        return True

    def forget(self, request: RequestState) -> None:
        for name in request.block_hashes:
            node = self.tree.nodes.get(name)
            if node is not None:
                self.tree.drop(node)
        for run in request.runs:
            for block in run.blocks:
                block.barred = True
        request.hash_at = sys.maxsize

    def truncate(self, request: RequestState, computed: int) -> None:
        whole, needed = computed // self.block_size, self._blocks_for(computed)
        for run in request.runs:
            for block in run.blocks[max(0, whole - run.first) :]:
                self.tree.detach(block)
        for run in request.runs:
            self._free_blocks(run.blocks[needed - run.first :])
            del run.blocks[needed - run.first :]
        request.pages_held = self._count_pages(request)
        request.computed = computed
        request.capacity = needed * self.block_size
        if request.hash_at < sys.maxsize:  # else no block may be cached
            request.hash_at = min(request.hash_at, (whole + 1) * self.block_size)

    def step_back(self, request: RequestState) -> None:
        """Let a request compute its last token once more.

        The block leaves the cache unless another request uses it: the step that computes it is
        launched, and the token will be computed from the same keys and values.
        """
        request.computed -= 1
        whole = request.computed // self.block_size
        blocks = [run.blocks[whole - run.first] for run in request.runs]
        node = blocks[0].node
        if node is not None and not node.children and all(block.users == 1 for block in blocks):
            for block in blocks:
                self.tree.detach(block)
            if request.hash_at < sys.maxsize:
                request.hash_at = min(request.hash_at, (whole + 1) * self.block_size)

    def free_old_blocks(self, request: RequestState, end: int, step: int) -> None:
        if step < request.entered:
            return  # of an earlier time with a slot
        depth = min(end, request.computed, len(request.tokens) - 1) // self.block_size
        request.release_at = (depth + 1) * self.block_size
        for group in self._windows:
            run = request.runs[group]
            count = self.tree.first_block(group, depth) - run.first
            if count > 0:
                self._free_blocks(run.blocks[:count])
                del run.blocks[:count]
                run.first += count
                request.pages_held -= count * self._pages[group]

    def count_returning(self, requests: Sequence[RequestState], retired_step: int) -> int:
        return sum(self._returning(request) for request in requests if request.last_step > retired_step)

    def _returning(self, request: RequestState) -> int:
        depth, pages = request.computed // self.block_size, 0
        for group in self._windows:
            run = request.runs[group]
            old = run.blocks[: max(0, self.tree.first_block(group, depth) - run.first)]
            pages += sum(self._pages[group] for block in old if block.users == 1)
        return pages

    def give_up(self, request: RequestState) -> list[BlockRun]:
        """Return the request's blocks; make its last border an anchor.

        A border that it shares with others counts as used later.
        """
        depth = min(request.computed, len(request.tokens) - 1) // self.block_size
        if depth and request.hash_at < sys.maxsize:
            self.tree.add_anchor(request.block_hashes, depth, request.live)
            if request.shared_border is not None and request.shared_border.span is not None:
                self.tree.use(request.shared_border, request.live)
        return request.runs

    def free(self, blocks: list[BlockRun], live: bool) -> None:
        for run in blocks:
            self._free_blocks(run.blocks)

    def pages_for(self, tokens: int) -> int:
        return min(self.num_pages - 1, self._peak(self._blocks_for(tokens), self._blocks_in_flight))

    def pages_to_begin(self, request: RequestState, prefix: Sequence[PrefixNode | None]) -> int:
        blocks, depth = self._blocks_for(request.known), len(prefix)
        pages = (blocks - depth) * self._full_pages + self.count_free(prefix)
        for group, (size, most) in zip(self._windows, self._spans, strict=True):
            first = self.tree.first_block(group, depth)
            pages += max(0, min(blocks - first, most + self._blocks_in_flight) - (depth - first)) * size
        return min(self.num_pages - 1, pages)

    def pages_to_finish(self, request: RequestState) -> int:
        return max(0, self.pages_for(request.known) - request.pages_held)

    def pages_at(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        blocks = np.ceil(lengths / self.block_size)
        pages = blocks * self._full_pages
        for size, most in self._spans:
            pages = pages + np.minimum(blocks, most) * size
        return pages

    def shared_pages(self, prefix: Sequence[PrefixNode | None]) -> int:
        return len(prefix) * self._full_pages

    def count_shared(self, request: RequestState) -> int:
        if not self._full:
            return 0
        blocks, known = request.runs[self._full[0]].blocks, request.shared // self._full_pages
        return self._full_pages * bisect_left(blocks, True, known, key=lambda block: block.users == 1)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _peak(self, blocks: int, in_flight: int = 0) -> int:
        """Return the most pages of a request of so many blocks, with those of launched steps."""
        windows = sum(size * min(blocks, most + in_flight) for size, most in self._spans)
        return blocks * self._full_pages + windows

    def _most_tokens(self) -> int:
        """Return the length of the longest request that goes on block by block."""
        total = self.num_pages - 1
        if not self._full and self._peak(sys.maxsize) <= total:
            return sys.maxsize
        return (bisect_right(range(total + 1), total, key=self._peak) - 1) * self.block_size

    def _runs(self, prefix: Sequence[PrefixNode | None]) -> list[BlockRun]:
        runs = []
        for group in range(len(self._pages)):
            first = self.tree.first_block(group, len(prefix))
            blocks = [node.blocks[group] for node in prefix[first:] if node is not None]
            runs.append(BlockRun(first, [block for block in blocks if block is not None]))
        return runs

    def _count_pages(self, request: RequestState) -> int:
        return sum(len(run.blocks) * size for run, size in zip(request.runs, self._pages, strict=True))

    def _free_blocks(self, blocks: Sequence[PageBlock]) -> None:
        for block in reversed(blocks):
            self.tree.free(block)


def _is_free(node: PrefixNode | None, group: int) -> bool:
    """Return whether no request uses the node's block."""
    block = None if node is None else node.blocks[group]
    return block is not None and not block.users


def _blocks_at(request: RequestState, index: int) -> list[PageBlock]:
    """Return the blocks of all groups that the request still has there."""
    return [run.blocks[index - run.first] for run in request.runs if run.first <= index < run.end]
