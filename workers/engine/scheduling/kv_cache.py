"""Manage the paged KV cache: allocate blocks to requests, and find cached blocks by token hash."""

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.step import NewBlocks
from workers.engine.scheduling.block_pool import BlockPool
from workers.engine.scheduling.request import RequestState


class KVCache:
    """Allocate blocks of `block_size` tokens to requests, and find cached prefixes.

    A full block is identified by a hash chained over every token up to its end, so equal hashes
    mean equal keys and values. Full blocks stay cached after their last reference is gone, until
    the pool evicts them. Only tokens that the host has received are hashed.

    This is the `SchedulerCache` of a single group that keeps all tokens: a page is a block.
    """

    block_pages = 1
    frees_old_blocks = False

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """Take `num_blocks` blocks.

        They include the null block, which padding rows write to and no request gets.
        """
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks, got {num_blocks}")
        self.pool = BlockPool(num_blocks)
        self.num_pages = num_blocks
        self.count_free = self.pool.count_free
        self.free = self.pool.free
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_tokens = (num_blocks - 1) * block_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def pages_to_begin(self, request: RequestState, prefix: list[int]) -> int:
        return self.pages_for(request.known) - len(prefix) + self.pool.count_free(prefix)

    def pages_to_finish(self, request: RequestState) -> int:
        return self.pages_for(request.known - request.capacity)

    def pages_at(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ceil(lengths / self.block_size)

    def shared_pages(self, prefix: list[int]) -> int:
        return len(prefix)

    def count_shared(self, request: RequestState) -> int:
        references = self.pool.ref_counts
        return bisect_left(request.blocks, True, request.shared, key=lambda each: references[each] == 1)

    def find_prefix(self, request: RequestState) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        full = hash_prefix(request, self.block_size)
        found: list[int] = []
        for block_hash in request.block_hashes[:full]:
            block = self.pool.cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def retain(self, request: RequestState) -> None:
        if self.enable_prefix_caching:
            request.retained = hash_prefix(request, self.block_size)
            self.pool.retain(request.block_hashes[: request.retained])

    def release(self, request: RequestState) -> None:
        self.pool.release(request.block_hashes[: request.retained])
        request.retained = 0

    def admit(self, request: RequestState, prefix: list[int]) -> None:
        self.pool.touch(prefix)
        request.blocks = prefix
        request.pages_held = request.shared = len(prefix)
        request.computed = request.capacity = len(prefix) * self.block_size
        request.hash_at = request.computed + self.block_size if self.enable_prefix_caching else sys.maxsize

    def held_blocks(self, request: RequestState) -> list[NewBlocks]:
        return [NewBlocks(request.slot, 0, request.blocks.copy())] if request.blocks else []

    def reach(self, request: RequestState, end: int) -> tuple[int, int]:
        return end, -(-(end - request.capacity) // self.block_size)

    def grow(self, request: RequestState, end: int) -> list[NewBlocks]:
        new = self.pool.allocate(self.pages_for(end - request.capacity))
        first = request.pages_held
        request.blocks += new
        request.pages_held += len(new)
        request.capacity += len(new) * self.block_size
        return [NewBlocks(request.slot, first, new)]

    def cache_blocks(self, request: RequestState) -> None:
        size = self.block_size
        full = min(request.computed, len(request.tokens)) // size
        first = request.hash_at // size - 1
        hash_blocks(request, full, size)
        for index in range(first, full):
            self.pool.cache_block(request.blocks[index], request.block_hashes[index])
        request.hash_at = (max(first, full) + 1) * size

    def forget(self, request: RequestState) -> None:
        for block in request.blocks:
            self.pool.evict(block)
        request.hash_at = sys.maxsize

    def truncate(self, request: RequestState, computed: int) -> None:
        size = self.block_size
        whole, needed = computed // size, self.pages_for(computed)
        for block in request.blocks[whole:]:
            self.pool.evict(block)
        self.pool.free(request.blocks[needed:], request.live)
        del request.blocks[needed:]
        request.computed = computed
        request.pages_held = needed
        request.capacity = needed * size
        request.hash_at = min(request.hash_at, (whole + 1) * size) if self.enable_prefix_caching else sys.maxsize

    def step_back(self, request: RequestState) -> None:
        request.computed -= 1
        whole = request.computed // self.block_size
        self.pool.evict(request.blocks[whole])
        if self.enable_prefix_caching:
            request.hash_at = min(request.hash_at, (whole + 1) * self.block_size)

    def free_old_blocks(self, request: RequestState, end: int, step: int) -> None:
        pass

    def count_returning(self, requests: Sequence[RequestState], retired_step: int) -> int:
        return 0

    def give_up(self, request: RequestState) -> list[int]:
        return request.blocks


def hash_prefix(request: RequestState, block_size: int) -> int:
    """Hash all blocks except the one with the last token; return the number of hashed blocks."""
    full = (len(request.tokens) - 1) // block_size
    hash_blocks(request, full, block_size)
    return full


def hash_blocks(request: RequestState, count: int, block_size: int) -> None:
    """Hash those of the request's first `count` blocks that have no hash yet."""
    hashes, tokens = request.block_hashes, request.tokens
    for index in range(len(hashes), count):
        block_tokens = tokens[index * block_size : (index + 1) * block_size]
        hashes.append(hash_block(hashes[-1] if hashes else b"", block_tokens))


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the BLAKE2b hash, 16 bytes, of a block.

    It covers the hash of the block before (empty for the first) and this block's token ids as
    32-bit integers.
    """
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()
