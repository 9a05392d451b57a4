"""Blocks of the paged KV cache: who holds them, and which hold the keys and values of a known run
of tokens.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from workers.engine.scheduling.block_pool import BlockPool
from workers.engine.scheduling.request import Request


class KVCache:
    """Gives blocks of `block_size` tokens to requests and finds the ones that earlier requests left
    filled.

    A full block is known by a hash chained over every token up to its end, so equal hashes mean
    equal keys and values. Full blocks stay findable after their last holder has gone, until the
    pool needs them. Only tokens that the host has seen are ever hashed.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """`num_blocks` counts the null block, which padding rows write to and no request gets."""
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks, got {num_blocks}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_tokens = (num_blocks - 1) * block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Filled blocks that hold the request's first tokens.

        The last token is never among them: it must be computed to sample.
        """
        if not self.enable_prefix_caching:
            return []
        full = self._hash_prefix(request)
        found: list[int] = []
        for block_hash in request.block_hashes[:full]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def want(self, request: Request) -> None:
        """Holds on to what a request that begins to wait would find, as long as other free blocks
        are left, until `unwant`.
        """
        if self.enable_prefix_caching:
            request.wanted = self._hash_prefix(request)
            self.pool.want(request.block_hashes[: request.wanted])

    def unwant(self, request: Request) -> None:
        """The request no longer waits."""
        self.pool.unwant(request.block_hashes[: request.wanted])
        request.wanted = 0

    def admit(self, request: Request, prefix: list[int]) -> None:
        """Makes a request without blocks hold `prefix`, as `find_prefix` returned it in this
        moment.
        """
        self.pool.share(prefix)
        request.blocks = prefix
        request.shared = len(prefix)
        request.computed = request.capacity = len(prefix) * self.block_size
        request.hash_at = request.computed + self.block_size if self.enable_prefix_caching else sys.maxsize

    def grow(self, request: Request, end: int) -> list[int]:
        """Gives the request room for its first `end` tokens; returns the new blocks.

        The pool must have them free.
        """
        new = self.pool.take(self.blocks_for(end - request.capacity))
        request.blocks += new
        request.capacity += len(new) * self.block_size
        return new

    def remember(self, request: Request) -> None:
        """Makes the blocks findable that are full of tokens that are both computed (or launched)
        and seen by the host.
        """
        size = self.block_size
        full = min(request.computed, len(request.tokens)) // size
        first = request.hash_at // size - 1
        self._extend_hashes(request, full)
        for index in range(first, full):
            self.pool.name(request.blocks[index], request.block_hashes[index])
        request.hash_at = (max(first, full) + 1) * size

    def shrink(self, request: Request, computed: int) -> None:
        """Takes a request back to its first `computed` tokens: those beyond were not computed after
        all, so no block of theirs is found.
        """
        size = self.block_size
        whole, kept = computed // size, self.blocks_for(computed)
        for block in request.blocks[whole:]:
            self.pool.unname(block)
        self.pool.give_back(request.blocks[kept:], request.live)
        del request.blocks[kept:]
        request.computed = computed
        request.capacity = kept * size
        request.hash_at = min(request.hash_at, (whole + 1) * size) if self.enable_prefix_caching else sys.maxsize

    def _hash_prefix(self, request: Request) -> int:
        """Hashes of all blocks but the one that holds the last token; returns how many those
        are.
        """
        full = (len(request.tokens) - 1) // self.block_size
        self._extend_hashes(request, full)
        return full

    def _extend_hashes(self, request: Request, full: int) -> None:
        hashes, tokens, size = request.block_hashes, request.tokens, self.block_size
        for index in range(len(hashes), full):
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens[index * size : (index + 1) * size]))


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """BLAKE2b, 16 bytes, over the hash of the block before (empty for the first) and this block's
    token ids as 32-bit integers.
    """
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()
