"""Blocks and their hashes: who gets which block, what is found again, what is forgotten first."""

import pytest

from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.scheduling.block_pool import BlockPool
from workers.engine.scheduling.kv_cache import KVCache, hash_block
from workers.engine.scheduling.request import Request

SIZE = 4


def request(tokens: list[int], number: int = 0) -> Request:
    return Request(EngineRequest(number, tokens, [], SamplingParams(8)), number, 1000, frozenset())


def compute(cache: KVCache, made: Request, end: int) -> None:
    """Gives the request its first `end` tokens' blocks, as a step would."""
    cache.grow(made, end)
    made.computed = end
    if end >= made.hash_at:
        cache.remember(made)


def admitted(cache: KVCache, tokens: list[int]) -> Request:
    made = request(tokens)
    cache.admit(made, cache.find_prefix(made))
    compute(cache, made, len(tokens))
    return made


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 KV blocks with 0 free"):
        pool.take(1)


def test_blocks_without_content_go_first_then_the_longest_unused() -> None:
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(2)
    for name, block in enumerate([*first, *second]):
        pool.name(block, bytes([name]))
    pool.give_back(second, live=False)
    pool.give_back(first, live=False)
    assert pool.take(1) == [5]
    # Of each request's blocks the last goes first, since a chain is found from its start.
    assert pool.take(4) == [second[1], second[0], first[1], first[0]]


def test_a_block_with_two_holders_stays_until_both_have_gone() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.give_back(blocks, live=False)
    assert pool.free == 1
    pool.give_back(blocks, live=False)
    assert pool.free == 2
    pool.check()


def left(pool: BlockPool, name: bytes, live: bool = False) -> int:
    """A block that someone filled and has no need of any more."""
    (block,) = pool.take(1)
    pool.name(block, name)
    pool.give_back([block], live)
    return block


def test_what_a_batch_left_goes_before_what_live_calls_left_and_both_before_what_is_waited_for() -> None:
    pool = BlockPool(6)
    pool.want([b"wanted", b"not there yet"])
    wanted, live, first = left(pool, b"wanted"), left(pool, b"live", live=True), left(pool, b"first")
    later, last = left(pool, b"not there yet"), left(pool, b"last")
    pool.check()
    assert pool.take(5) == [first, last, live, wanted, later]


def test_a_prefix_is_let_go_when_the_last_who_waited_for_it_has_been_let_in() -> None:
    pool = BlockPool(4)
    for _ in range(2):
        pool.want([b"prefix"])
    prefix, other = left(pool, b"prefix"), left(pool, b"other")
    pool.share([prefix])
    pool.unwant([b"prefix"])
    pool.give_back([prefix], live=False)
    assert pool.take(2) == [3, other]
    pool.unwant([b"prefix"])
    assert pool.wants() == {}
    pool.check()
    assert pool.take(1) == [prefix]


@pytest.mark.parametrize("lets_go", [False, True])
def test_of_a_prefix_that_is_or_was_waited_for_the_end_goes_first(lets_go: bool) -> None:
    cache = KVCache(10, SIZE)
    first, waiting = admitted(cache, list(range(8 * SIZE + 1))), request([*range(8 * SIZE), 50])
    cache.pool.give_back(first.blocks, live=False)
    cache.want(waiting)
    if lets_go:
        cache.unwant(waiting)
    cache.pool.take(2)  # one of them has no content
    assert len(cache.find_prefix(waiting)) == 7


def test_a_request_that_waits_holds_on_to_what_it_would_find() -> None:
    cache = KVCache(4, SIZE)
    first = admitted(cache, list(range(9)))
    waiting = request([*range(8), 50])
    cache.want(waiting)
    cache.pool.give_back(first.blocks, live=False)
    left(cache.pool, b"newer")
    (taken,) = cache.pool.take(1)
    assert taken not in cache.find_prefix(waiting)
    assert len(cache.find_prefix(waiting)) == 2
    cache.admit(waiting, cache.find_prefix(waiting))
    cache.unwant(waiting)
    assert cache.pool.wants() == {}
    cache.pool.check()


def test_a_block_whose_content_stands_elsewhere_keeps_no_name() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.name(first, b"same")
    pool.name(second, b"same")
    assert pool.find(b"same") == first
    pool.give_back([second], live=False)
    assert pool.take(2) == [second, 3]
    pool.check()


def test_taking_a_block_again_forgets_its_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.name(block, b"old")
    pool.give_back([block], live=False)
    assert pool.find(b"old") == block
    pool.take(1)
    assert pool.find(b"old") is None
    pool.check()


def test_giving_back_too_often_is_noticed() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.give_back(blocks, live=False)
    pool.give_back(blocks, live=False)
    with pytest.raises(RuntimeError):
        pool.check()


def test_a_prefix_is_found_by_its_full_blocks() -> None:
    cache = KVCache(16, SIZE)
    first = admitted(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = request([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert cache.find_prefix(second) == first.blocks[:2]
    cache.pool.give_back(first.blocks, live=False)
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


def test_a_chain_ends_at_the_first_lost_block() -> None:
    cache = KVCache(4, SIZE)
    first = admitted(cache, list(range(12)))
    blocks = first.blocks
    cache.pool.give_back(blocks, live=False)
    taken = cache.pool.take(1)
    assert taken == [blocks[2]]
    assert cache.find_prefix(request([*range(12), 1])) == blocks[:2]


def test_a_block_is_found_only_once_the_host_has_seen_all_its_tokens() -> None:
    cache = KVCache(16, SIZE)
    made = request([1, 2, 3])
    cache.admit(made, [])
    made.known = 4
    # One step ahead: the fourth token is computed before the host has seen it
    compute(cache, made, 4)
    assert cache.pool.names() == {}
    made.tokens.append(9)
    cache.remember(made)
    assert cache.pool.names() == {hash_block(b"", [1, 2, 3, 9]): made.blocks[0]}


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    cache = KVCache(16, SIZE, enable_prefix_caching=False)
    first = admitted(cache, list(range(12)))
    assert (cache.pool.names(), first.block_hashes) == ({}, [])
    assert cache.find_prefix(request(list(range(12)))) == []


def test_a_cache_of_only_the_null_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        KVCache(1, SIZE)
