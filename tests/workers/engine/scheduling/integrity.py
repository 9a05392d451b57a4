"""What the scheduler's books have to agree on: at any time, and when nothing is left to do."""

from itertools import chain

import numpy as np

from workers.engine.scheduling.block_pool import NULL_BLOCK, BlockPool
from workers.engine.scheduling.forecast import AdmissionForecast
from workers.engine.scheduling.scheduler import Scheduler


def check_pool(pool: BlockPool) -> None:
    """Free lists, reference counts and the cache agree."""
    tiers = (pool._batch_tier, pool._live_tier, pool._retained_tier)
    free = sorted(chain(pool._uncached, *tiers))
    unused = [block for block in range(1, pool.num_blocks) if pool.ref_counts[block] == 0]
    assert free == unused, "the free list of KV blocks differs from the blocks without references"
    assert min(pool.ref_counts) >= 0, "a KV block was freed more often than allocated"
    assert not pool.ref_counts[NULL_BLOCK], "the null block was allocated"
    hashes = {block_hash: block for block, block_hash in enumerate(pool._hashes) if block_hash is not None}
    assert pool.cached == hashes, "the hashes of KV blocks differ from the cached blocks"
    assert all(pool._hashes[block] is None for block in pool._uncached), "a cached block is in the wrong list"
    assert all(pool._hashes[block] is not None for block in chain(*tiers)), "an uncached block is in a tier"
    assert all(pool._tier_of[block] is tier for tier in tiers for block in tier), "a block is in another tier"
    retained = {block_hash for block_hash in pool.retain_counts if _is_free(pool, block_hash)}
    assert retained == {pool._hashes[block] for block in pool._retained_tier}, "the retained blocks differ"


def check_idle(scheduler: Scheduler) -> None:
    """No request, slot or block is in use or counted."""
    pool, queues = scheduler._pool, scheduler._queues
    check_pool(pool)
    assert not scheduler._requests
    assert not scheduler._launched
    used = pool.num_blocks - 1 - pool.num_free
    assert not used, f"{used} KV blocks are in use"
    assert not pool.retain_counts
    assert not queues.running
    assert not queues.live.waiting
    assert not queues.batch.waiting
    assert not scheduler._slots.returning
    policy = queues._policy
    if isinstance(policy, AdmissionForecast):
        assert not policy._curves, f"{len(policy._curves)} requests are in the forecast"
        assert np.abs(policy._total).max() < 1e-6


def _is_free(pool: BlockPool, block_hash: bytes) -> bool:
    block = pool.cached.get(block_hash)
    return block is not None and not pool.ref_counts[block]
