"""What the scheduler's books have to agree on: at any time, and when nothing is left to do."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np

from workers.engine.scheduling.block_pool import NULL_BLOCK, BlockPool
from workers.engine.scheduling.forecast import AdmissionForecast
from workers.engine.scheduling.hybrid_cache import HybridKVCache
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.prefix_tree import BlockRun, PageBlock, PrefixNode, PrefixTree
from workers.engine.scheduling.scheduler import Scheduler


def check_cache(scheduler: Scheduler) -> None:
    """Check that the cache's records of its pages match the requests."""
    kv_cache = scheduler._kv_cache
    if isinstance(kv_cache, KVCache):
        check_pool(kv_cache.pool)
    elif isinstance(kv_cache, HybridKVCache):
        check_tree(kv_cache, _runs(scheduler))
        for request in scheduler._queues.running:
            assert request.pages_held == sum(len(b.pages) for run in request.runs for b in run.blocks)
            if not scheduler._launched:
                depth = min(request.computed, len(request.tokens) - 1) // kv_cache.block_size
                firsts = [kv_cache.tree.first_block(group, depth) for group in range(len(request.runs))]
                assert [run.first for run in request.runs] == firsts, "a request has other blocks than it may need"


def _runs(scheduler: Scheduler) -> list[BlockRun]:
    """Return the blocks of all requests, and those that are returning."""
    running = [request.runs for request in scheduler._queues.running]
    return list(chain(*running, *(returning.blocks for returning in scheduler._slots.returning)))


def check_tree(kv_cache: HybridKVCache, runs: list[BlockRun]) -> None:
    """Each page is in one place, and no page is kept that no request can use."""
    _check_pages(kv_cache, runs)
    _check_anchors(kv_cache.tree)
    _check_nodes(kv_cache.tree)
    _check_retained(kv_cache.tree)


def _check_pages(kv_cache: HybridKVCache, runs: list[BlockRun]) -> None:
    tree, pool = kv_cache.tree, kv_cache.pool
    users = Counter(id(block) for run in runs for block in run.blocks)
    used = {id(block): block for run in runs for block in run.blocks}
    cached = {id(block): block for node in tree.nodes.values() for block in _blocks(node)}
    for block in (used | cached).values():
        assert block.users == users[id(block)], "a block has another number of users than requests that have it"
        assert block.node is None or (block in _blocks(block.node) and not block.barred)
        assert len(block.pages) == kv_cache._pages[block.group]
    pages = [page for block in (used | cached).values() for page in block.pages]
    assert sorted(pages + pool.unused) == list(range(1, pool.num_pages)), "a page is lost, or in two places"
    assert pool.in_use == sum(len(block.pages) for block in used.values()), "pages in use are counted wrongly"


def _check_anchors(tree: PrefixTree) -> None:
    """Each anchor is in its tier, and can be resumed."""
    tiers = (tree._batch_tier, tree._live_tier, tree._retained_tier)
    anchors = _anchors(tree)
    assert {id(node) for node in anchors} == {id(node) for tier in tiers for node in tier}
    assert sum(map(len, tiers)) == len(anchors), "an anchor is in two tiers"
    for anchor in anchors:
        unretained = tree._live_tier if anchor.live else tree._batch_tier
        assert anchor.tier is (tree._retained_tier if anchor.held else unretained)
        for group, needed in _needed_by(tree, anchor):
            assert all(node.blocks[group] is not None for node in needed), "an anchor lacks a block"


def _check_nodes(tree: PrefixTree) -> None:
    """Each node and each block without users is needed by an anchor."""
    anchors = _anchors(tree)
    needed = Counter(
        (id(node), group) for anchor in anchors for group, nodes in _needed_by(tree, anchor) for node in nodes
    )
    in_use = [node for node in tree.nodes.values() if node.in_use]
    kept = {id(each) for node in (*anchors, *in_use) for each in _chain(node)}
    for name, node in tree.nodes.items():
        assert name == node.name
        assert node.parent is None or node.parent.children[name] is node
        assert id(node) in kept or any(node.needed), "a node is kept for nothing"
        for group, rule in enumerate(tree._rules):
            assert rule.keeps_all or node.needed[group] == needed[id(node), group]
            block = node.blocks[group]
            if block is not None and not block.users:
                assert needed[id(node), group], "a block is kept for nothing"
                assert not any(copy.group == group for copy in node.copies), "a copy in use is not the one cached"


def _check_retained(tree: PrefixTree) -> None:
    """Waiting requests hold the anchors that they would hit."""
    held = Counter(id(retained.anchor) for retained in tree._retained.values())
    assert all(node.held == held[id(node)] for node in tree.nodes.values())
    for retained in tree._retained.values():
        known = [tree.nodes[name] for name in retained.hashes if name in tree.nodes]
        anchors = [node for node in known if node.span is not None]
        assert not tree._chained or retained.anchor is (anchors[-1] if anchors else None)


def _anchors(tree: PrefixTree) -> list[PrefixNode]:
    return [node for node in tree.nodes.values() if node.span is not None]


def _needed_by(tree: PrefixTree, anchor: PrefixNode) -> Iterator[tuple[int, list[PrefixNode]]]:
    """Yield each group with the nodes whose blocks the next token after the anchor reads."""
    for group, rule in enumerate(tree._rules):
        if rule.keeps_all:
            nodes = _chain(anchor)
            assert len(nodes) == anchor.depth
            yield group, nodes
        else:
            span = anchor.span or []
            yield group, span[len(span) - anchor.depth + tree.first_block(group, anchor.depth) :]


def _blocks(node: PrefixNode) -> list[PageBlock]:
    return [block for block in (*node.blocks, *node.copies) if block is not None]


def _chain(node: PrefixNode | None) -> list[PrefixNode]:
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes


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
    kv_cache, queues = scheduler._kv_cache, scheduler._queues
    check_cache(scheduler)
    assert not scheduler._requests
    assert not scheduler._launched
    used = kv_cache.num_pages - 1 - kv_cache.pool.num_free
    assert not used, f"{used} KV pages are in use"
    assert isinstance(kv_cache, KVCache | HybridKVCache)
    assert not (kv_cache.pool if isinstance(kv_cache, KVCache) else kv_cache.tree).retain_counts
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
