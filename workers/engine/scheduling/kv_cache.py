"""Manage the paged KV cache: allocate blocks to requests, and find cached blocks by token hash."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from workers.engine.scheduling.block_pool import BlockPool
from workers.engine.scheduling.request import RequestState


class KVCache:
    """Allocate blocks of `block_size` tokens to requests, and find cached prefixes.

    A full block is identified by a hash chained over every token up to its end, so equal hashes
    mean equal keys and values. Full blocks stay cached after their last reference is gone, until
    the pool evicts them. Only tokens that the host has received are hashed.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """Take `num_blocks` blocks.

        They include the null block, which padding rows write to and no request gets.
        """
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks, got {num_blocks}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_tokens = (num_blocks - 1) * block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find_prefix(self, request: RequestState) -> list[int]:
        """Return the cached blocks that contain the request's first tokens.

        They never include the last token, which must be computed to sample.
        """
        if not self.enable_prefix_caching:
            return []
        full = self._hash_prefix(request)
        found: list[int] = []
        for block_hash in request.block_hashes[:full]:
            block = self.pool.cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def retain(self, request: RequestState) -> None:
        """Evict the cached prefix of a request that begins to wait last, until `release`."""
        if self.enable_prefix_caching:
            request.retained = self._hash_prefix(request)
            self.pool.retain(request.block_hashes[: request.retained])

    def release(self, request: RequestState) -> None:
        """Undo `retain` for a request that no longer waits."""
        self.pool.release(request.block_hashes[: request.retained])
        request.retained = 0

    def admit(self, request: RequestState, prefix: list[int]) -> None:
        """Assign `prefix`, the result of the latest `find_prefix`, to a request without blocks."""
        self.pool.touch(prefix)
        request.blocks = prefix
        request.shared = len(prefix)
        request.computed = request.capacity = len(prefix) * self.block_size
        request.hash_at = request.computed + self.block_size if self.enable_prefix_caching else sys.maxsize

    def grow(self, request: RequestState, end: int) -> list[int]:
        """Allocate blocks for the request's first `end` tokens; return the new ones.

        Raises RuntimeError if the pool has too few free blocks.
        """
        new = self.pool.allocate(self.blocks_for(end - request.capacity))
        request.blocks += new
        request.capacity += len(new) * self.block_size
        return new

    def cache_blocks(self, request: RequestState) -> None:
        """Cache the request's full blocks.

        Their tokens are computed (or launched), and the host has received them.
        """
        size = self.block_size
        full = min(request.computed, len(request.tokens)) // size
        first = request.hash_at // size - 1
        self._extend_hashes(request, full)
        for index in range(first, full):
            self.pool.cache_block(request.blocks[index], request.block_hashes[index])
        request.hash_at = (max(first, full) + 1) * size

    def forget(self, request: RequestState) -> None:
        """Remove the request's blocks from the cache, and keep them out of it."""
        for block in request.blocks:
            self.pool.evict(block)
        request.hash_at = sys.maxsize

    def truncate(self, request: RequestState, computed: int) -> None:
        """Take a request back to its first `computed` tokens.

        Later tokens were not computed after all, so their blocks leave the cache.
        """
        size = self.block_size
        whole, needed = computed // size, self.blocks_for(computed)
        for block in request.blocks[whole:]:
            self.pool.evict(block)
        self.pool.free(request.blocks[needed:], request.live)
        del request.blocks[needed:]
        request.computed = computed
        request.capacity = needed * size
        request.hash_at = min(request.hash_at, (whole + 1) * size) if self.enable_prefix_caching else sys.maxsize

    def step_back(self, request: RequestState) -> None:
        """Let a request compute its last token once more; no other request may find its block."""
        request.computed -= 1
        whole = request.computed // self.block_size
        self.pool.evict(request.blocks[whole])
        if self.enable_prefix_caching:
            request.hash_at = min(request.hash_at, (whole + 1) * self.block_size)

    def _hash_prefix(self, request: RequestState) -> int:
        """Hash all blocks except the one with the last token; return the number of hashed
        blocks.
        """
        full = (len(request.tokens) - 1) // self.block_size
        self._extend_hashes(request, full)
        return full

    def _extend_hashes(self, request: RequestState, full: int) -> None:
        hashes, tokens, size = request.block_hashes, request.tokens, self.block_size
        for index in range(len(hashes), full):
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens[index * size : (index + 1) * size]))


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the BLAKE2b hash, 16 bytes, of a block.

    It covers the hash of the block before (empty for the first) and this block's token ids as
    32-bit integers.
    """
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()
