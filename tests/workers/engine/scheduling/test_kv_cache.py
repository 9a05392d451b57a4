"""Blocks and their hashes: allocation, lookup and the order of eviction."""

import pytest

from tests.workers.engine.scheduling.integrity import check_pool
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.scheduling.block_pool import BlockPool
from workers.engine.scheduling.kv_cache import KVCache, hash_block
from workers.engine.scheduling.request import RequestState

SIZE = 4


def request(tokens: list[int], number: int = 0) -> RequestState:
    return RequestState(EngineRequest(number, tokens, [], SamplingParams(8)), number, 1000, frozenset())


def compute(cache: KVCache, made: RequestState, end: int) -> None:
    """Allocate the blocks of the request's first `end` tokens, as a step would."""
    cache.grow(made, end)
    made.computed = end
    if end >= made.hash_at:
        cache.cache_blocks(made)


def admitted(cache: KVCache, tokens: list[int]) -> RequestState:
    made = request(tokens)
    cache.admit(made, cache.find_prefix(made))
    compute(cache, made, len(tokens))
    return made


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 KV blocks with 0 free"):
        pool.allocate(1)


def test_uncached_blocks_are_allocated_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    for name, block in enumerate([*first, *second]):
        pool.cache_block(block, bytes([name]))
    pool.free(second, live=False)
    pool.free(first, live=False)
    assert pool.allocate(1) == [5]
    # Of each request's blocks the last goes first, since a chain is found from its start.
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_a_block_with_two_references_is_free_after_both_are_gone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.touch(blocks)
    pool.free(blocks, live=False)
    assert pool.num_free == 1
    pool.free(blocks, live=False)
    assert pool.num_free == 2
    check_pool(pool)


def cached(pool: BlockPool, block_hash: bytes, live: bool = False) -> int:
    """Return a free block with cached content."""
    (block,) = pool.allocate(1)
    pool.cache_block(block, block_hash)
    pool.free([block], live)
    return block


def test_batch_content_is_evicted_before_live_content_and_both_before_retained_content() -> None:
    pool = BlockPool(6)
    pool.retain([b"retained", b"not there yet"])
    retained, live, first = cached(pool, b"retained"), cached(pool, b"live", live=True), cached(pool, b"first")
    later, last = cached(pool, b"not there yet"), cached(pool, b"last")
    check_pool(pool)
    assert pool.allocate(5) == [first, last, live, retained, later]


def test_a_prefix_is_released_when_the_last_request_that_retains_it_is_admitted() -> None:
    pool = BlockPool(4)
    for _ in range(2):
        pool.retain([b"prefix"])
    prefix, other = cached(pool, b"prefix"), cached(pool, b"other")
    pool.touch([prefix])
    pool.release([b"prefix"])
    pool.free([prefix], live=False)
    assert pool.allocate(2) == [3, other]
    pool.release([b"prefix"])
    assert pool.retain_counts == {}
    check_pool(pool)
    assert pool.allocate(1) == [prefix]


@pytest.mark.parametrize("released", [False, True])
def test_of_a_prefix_that_is_or_was_retained_the_end_is_evicted_first(released: bool) -> None:
    cache = KVCache(10, SIZE)
    first, waiting = admitted(cache, list(range(8 * SIZE + 1))), request([*range(8 * SIZE), 50])
    cache.pool.free(first.blocks, live=False)
    cache.retain(waiting)
    if released:
        cache.release(waiting)
    cache.pool.allocate(2)  # one of them is uncached
    assert len(cache.find_prefix(waiting)) == 7


def test_a_waiting_request_retains_its_cached_prefix() -> None:
    cache = KVCache(4, SIZE)
    first = admitted(cache, list(range(9)))
    waiting = request([*range(8), 50])
    cache.retain(waiting)
    cache.pool.free(first.blocks, live=False)
    cached(cache.pool, b"newer")
    (allocated,) = cache.pool.allocate(1)
    assert allocated not in cache.find_prefix(waiting)
    assert len(cache.find_prefix(waiting)) == 2
    cache.admit(waiting, cache.find_prefix(waiting))
    cache.release(waiting)
    assert cache.pool.retain_counts == {}
    check_pool(cache.pool)


def test_content_that_another_block_caches_is_not_cached_twice() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache_block(first, b"same")
    pool.cache_block(second, b"same")
    assert pool.cached.get(b"same") == first
    pool.free([second], live=False)
    assert pool.allocate(2) == [second, 3]
    check_pool(pool)


def test_allocating_a_block_again_evicts_its_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"old")
    pool.free([block], live=False)
    assert pool.cached.get(b"old") == block
    pool.allocate(1)
    assert pool.cached.get(b"old") is None
    check_pool(pool)


def test_freeing_too_often_is_detected() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks, live=False)
    pool.free(blocks, live=False)
    with pytest.raises(AssertionError):
        check_pool(pool)


def test_a_prefix_is_found_by_its_full_blocks() -> None:
    cache = KVCache(16, SIZE)
    first = admitted(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = request([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert cache.find_prefix(second) == first.blocks[:2]
    cache.pool.free(first.blocks, live=False)
    assert cache.find_prefix(second) == first.blocks[:2]


def test_equal_blocks_after_different_ones_are_not_the_same() -> None:
    cache = KVCache(16, SIZE)
    admitted(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.find_prefix(request([0, 2, 3, 4, 5, 6, 7, 8, 9])) == []
    assert hash_block(b"", [1, 2]) != hash_block(b"x", [1, 2])


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_computed_even_when_all_is_cached(length: int, hit: int) -> None:
    cache = KVCache(16, SIZE)
    admitted(cache, list(range(12)))
    assert len(cache.find_prefix(request(list(range(length))))) == hit


def test_a_chain_ends_at_the_first_evicted_block() -> None:
    cache = KVCache(4, SIZE)
    first = admitted(cache, list(range(12)))
    blocks = first.blocks
    cache.pool.free(blocks, live=False)
    allocated = cache.pool.allocate(1)
    assert allocated == [blocks[2]]
    assert cache.find_prefix(request([*range(12), 1])) == blocks[:2]


def test_a_block_is_found_only_once_the_host_has_seen_all_its_tokens() -> None:
    cache = KVCache(16, SIZE)
    made = request([1, 2, 3])
    cache.admit(made, [])
    made.known = 4
    # One step ahead: the fourth token is computed before the host has seen it
    compute(cache, made, 4)
    assert cache.pool.cached == {}
    made.tokens.append(9)
    cache.cache_blocks(made)
    assert cache.pool.cached == {hash_block(b"", [1, 2, 3, 9]): made.blocks[0]}


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    cache = KVCache(16, SIZE, enable_prefix_caching=False)
    first = admitted(cache, list(range(12)))
    assert (cache.pool.cached, first.block_hashes) == ({}, [])
    assert cache.find_prefix(request(list(range(12)))) == []


def test_a_cache_of_only_the_null_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        KVCache(1, SIZE)
