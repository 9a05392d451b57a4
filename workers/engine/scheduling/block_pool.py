"""Reference counts of KV cache blocks, their cached content, and the order of eviction."""

from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, content hashes and the free list of all blocks but the null block.

    A free block without cached content is allocated first. After those come the eviction tiers,
    each an LRU queue:

    1. cached content of batch requests that is not retained
    2. cached content of live requests that is not retained
    3. content that waiting requests retain

    So the blocks of a batch evict neither the prefix of the requests that come next nor what a
    live call may ask for again.

    Of the attributes, `ref_counts`, `cached` and `retain_counts` may be read elsewhere.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # requests that use each block
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}  # the block with each content
        self._uncached = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._batch_tier: OrderedDict[int, None] = OrderedDict()
        self._live_tier: OrderedDict[int, None] = OrderedDict()
        self._retained_tier: OrderedDict[int, None] = OrderedDict()
        # The tier of each free block with cached content
        self._tier_of: list[OrderedDict[int, None] | None] = [None] * num_blocks
        self.retain_counts: dict[bytes, int] = {}  # waiting requests by block hash

    @property
    def num_free(self) -> int:
        """Return how many blocks have a reference count of 0, including those with cached
        content.
        """
        return len(self._uncached) + len(self._batch_tier) + len(self._live_tier) + len(self._retained_tier)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; evict cached content if necessary.

        Raises RuntimeError if fewer are free.
        """
        if count > self.num_free:
            raise RuntimeError(f"asked for {count} KV blocks with {self.num_free} free")
        blocks = []
        for _ in range(count):
            if self._uncached:
                block = self._uncached.pop()
            else:
                block, _ = (self._batch_tier or self._live_tier or self._retained_tier).popitem(last=False)
                self._tier_of[block] = None
                self.evict(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that are in use or have cached content."""
        for block in blocks:
            tier = self._tier_of[block]
            if tier is not None:
                del tier[block]
                self._tier_of[block] = None
            self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int], live: bool) -> None:
        """Drop a reference to each of a request's blocks.

        The last blocks are evicted first: a prefix is useful without its end.
        """
        ref_counts, hashes, retain_counts, tier_of, unretained_tier = (
            self.ref_counts,
            self._hashes,
            self.retain_counts,
            self._tier_of,
            self._live_tier if live else self._batch_tier,
        )
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if not ref_counts[block]:
                block_hash = hashes[block]
                if block_hash is None:
                    self._uncached.append(block)
                else:
                    tier = tier_of[block] = self._retained_tier if block_hash in retain_counts else unretained_tier
                    tier[block] = None

    def retain(self, hashes: Sequence[bytes]) -> None:
        """Evict content with these hashes last, until `release`.

        This is a hint for a waiting request: the blocks stay evictable, and may not exist yet.
        `hashes` are in the order of its prompt.
        """
        for block_hash in reversed(hashes):
            waiting = self.retain_counts.get(block_hash, 0)
            self.retain_counts[block_hash] = waiting + 1
            if not waiting:
                self._move(block_hash, self._retained_tier)

    def release(self, hashes: Sequence[bytes]) -> None:
        """Undo one `retain`; free content that no other request retains moves to the batch tier."""
        for block_hash in reversed(hashes):
            waiting = self.retain_counts[block_hash] - 1
            if waiting:
                self.retain_counts[block_hash] = waiting
            else:
                del self.retain_counts[block_hash]
                self._move(block_hash, self._batch_tier)

    def count_free(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have a reference count of 0."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Cache the content of a block in use, unless another block already caches it."""
        if self._hashes[block] is None and self.cached.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def evict(self, block: int) -> None:
        """Remove a block's content from the cache, if it is cached.

        The block is in use, or about to be.
        """
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self.cached[block_hash]
            self._hashes[block] = None

    def _move(self, block_hash: bytes, tier: OrderedDict[int, None]) -> None:
        """Move the block with that content, if it is free, to another tier, as last used."""
        block = self.cached.get(block_hash)
        if block is not None and (now := self._tier_of[block]) is not None:
            del now[block]
            tier[block] = None
            self._tier_of[block] = tier
