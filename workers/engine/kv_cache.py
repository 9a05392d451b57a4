"""Blocks of the paged KV cache: who holds them, and which hold the keys and values of a known run of tokens. Imports no torch."""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from workers.engine.request import Request

NULL_BLOCK = 0


class KVCache:
    """Gives blocks of `block_size` tokens to requests and finds the ones that earlier requests left filled.

    A full block is known by a hash chained over every token up to its end, so equal hashes mean equal keys and values. Full blocks stay
    findable after their last holder has gone, until the pool needs them. Only tokens that the host has seen are ever hashed.
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
        """Filled blocks that hold the request's first tokens. The last token is never among them: it must be computed to sample."""
        if not self.enable_prefix_caching:
            return []
        full = (len(request.tokens) - 1) // self.block_size
        self._extend_hashes(request, full)
        found: list[int] = []
        for block_hash in request.block_hashes[:full]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, request: Request, prefix: list[int]) -> None:
        """Makes a request without blocks hold `prefix`, as `find_prefix` returned it in this moment."""
        self.pool.share(prefix)
        request.blocks = prefix
        request.computed = request.capacity = len(prefix) * self.block_size
        request.hash_at = request.computed + self.block_size if self.enable_prefix_caching else sys.maxsize

    def grow(self, request: Request, end: int) -> list[int]:
        """Gives the request room for its first `end` tokens; returns the new blocks. The pool must have them free."""
        new = self.pool.take(self.blocks_for(end - request.capacity))
        request.blocks += new
        request.capacity += len(new) * self.block_size
        return new

    def remember(self, request: Request) -> None:
        """Makes the blocks findable that are full of tokens that are both computed (or launched) and seen by the host."""
        size = self.block_size
        full = min(request.computed, len(request.tokens)) // size
        first = request.hash_at // size - 1
        self._extend_hashes(request, full)
        for index in range(first, full):
            self.pool.name(request.blocks[index], request.block_hashes[index])
        request.hash_at = (max(first, full) + 1) * size

    def shrink(self, request: Request, computed: int) -> None:
        """Takes a request back to its first `computed` tokens: those beyond were not computed after all, so no block of theirs is found."""
        size = self.block_size
        whole, kept = computed // size, self.blocks_for(computed)
        for block in request.blocks[whole:]:
            self.pool.unname(block)
        self.pool.give_back(request.blocks[kept:])
        del request.blocks[kept:]
        request.computed = computed
        request.capacity = kept * size
        request.hash_at = min(request.hash_at, (whole + 1) * size) if self.enable_prefix_caching else sys.maxsize

    def _extend_hashes(self, request: Request, full: int) -> None:
        hashes, tokens, size = request.block_hashes, request.tokens, self.block_size
        for index in range(len(hashes), full):
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens[index * size : (index + 1) * size]))


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """BLAKE2b, 16 bytes, over the hash of the block before (empty for the first) and this block's token ids as 32-bit integers."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference counts, names and the free list of all blocks but the null block.

    A free block is either unnamed, and goes first, or still holds named content, and goes by least recent use.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._unnamed = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._named: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody holds, those with findable content included."""
        return len(self._unnamed) + len(self._named)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks with one holder each. Raises RuntimeError when fewer are free."""
        if count > self.free:
            raise RuntimeError(f"asked for {count} KV blocks with {self.free} free")
        blocks = []
        for _ in range(count):
            if self._unnamed:
                block = self._unnamed.pop()
            else:
                block, _ = self._named.popitem(last=False)
                self.unname(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that have holders or findable content."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._named[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Takes a holder from each of a request's blocks. Its last blocks become the first to go: a prefix is of use without its end."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._names[block] is None:
                    self._unnamed.append(block)
                else:
                    self._named[block] = None

    def find(self, name: bytes) -> int | None:
        return self._by_name.get(name)

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds."""
        return sum(self._holders[block] == 0 for block in blocks)

    def name(self, block: int, name: bytes) -> None:
        """Makes a held block findable, unless another block has that content already."""
        if self._names[block] is None and self._by_name.setdefault(name, block) == block:
            self._names[block] = name

    def unname(self, block: int) -> None:
        """Makes a block's content unfindable, if it was findable; such a block is held, or about to be."""
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None

    def names(self) -> dict[bytes, int]:
        """Every name with its block, for integrity checks."""
        return dict(self._by_name)

    def holders(self) -> list[int]:
        """Holders by block, for integrity checks."""
        return list(self._holders)

    def check(self) -> None:
        """Raises RuntimeError unless the free list holds exactly the blocks without holders, and names and blocks agree."""
        free = sorted([*self._unnamed, *self._named])
        if free != [block for block in range(1, self.num_blocks) if self._holders[block] == 0]:
            raise RuntimeError("the free list of KV blocks differs from the blocks without holders")
        if any(count < 0 for count in self._holders) or self._holders[NULL_BLOCK]:
            raise RuntimeError("a KV block was given back more often than taken, or the null block was taken")
        if self._by_name != {name: block for block, name in enumerate(self._names) if name is not None}:
            raise RuntimeError("names of KV blocks and blocks disagree")
        if any(self._names[block] is not None for block in self._unnamed) or any(self._names[block] is None for block in self._named):
            raise RuntimeError("a free KV block stands in the wrong list")
