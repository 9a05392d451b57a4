"""Cached prefixes of a model whose layers form several groups.

Each node is a full block of tokens, identified by the hash of all tokens up to its end. It has the
block of each group, as far as that is cached. The *border* after a node can be resumed if every
group has what the next token reads: all blocks up to there, or the last ones of a window.

A border that is worth its pages is an *anchor*. Blocks that no request uses are cached only if an
anchor needs them, so evicting an anchor frees all that is useless without it. Anchors are evicted
in the tiers of `BlockPool`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workers.engine.messages.cache_groups import CacheRule
from workers.engine.scheduling.page_pool import PagePool


class PageBlock:
    """A block of one group: `pages`, the number of requests that use it, and where it is cached."""

    __slots__ = ("barred", "group", "node", "pages", "users")

    def __init__(self, group: int, pages: list[int]) -> None:
        self.group = group
        self.pages = pages
        self.users = 1
        self.node: PrefixNode | None = None
        self.barred = False  # never to be cached


class BlockRun:
    """The consecutive blocks of one group that a request uses, from its block `first` on."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int, blocks: list[PageBlock]) -> None:
        self.first = first
        self.blocks = blocks

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class PrefixNode:
    """A full block of tokens; `depth` counts the blocks up to its end."""

    __slots__ = ("blocks", "children", "copies", "depth", "held", "live", "name", "needed", "parent", "span", "tier")

    def __init__(self, name: bytes, depth: int, groups: int) -> None:
        self.name = name
        self.depth = depth
        self.parent: PrefixNode | None = None
        self.children: dict[bytes, PrefixNode] = {}
        self.blocks: list[PageBlock | None] = [None] * groups
        self.copies: list[PageBlock] = []  # other blocks in use with the same content
        self.needed = [0] * groups  # anchors whose windows need the block
        # Of an anchor, the nodes that windows need, in order, itself last; else None
        self.span: list[PrefixNode] | None = None
        self.held = 0  # waiting requests that would hit this anchor
        self.live = False  # whether the request that used it last is live
        self.tier: OrderedDict[PrefixNode, None] | None = None

    @property
    def in_use(self) -> bool:
        return any(block is not None and block.users for block in self.blocks)


@dataclass(slots=True)
class Retained:
    """The hashes of a waiting request, and the anchor that it would hit."""

    hashes: list[bytes]
    anchor: PrefixNode | None


class PrefixTree:
    """Own the blocks of all groups, in use or cached.

    If a group keeps all tokens, a node exists only below its parent, and has a block of each such
    group. Else the nodes with blocks are linked as far as anchors need them.
    """

    def __init__(self, rules: Sequence[CacheRule], block_size: int, pool: PagePool) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}
        self.retain_counts: dict[bytes, int] = {}  # waiting requests by block hash
        self._rules = rules
        self._windows = [group for group, rule in enumerate(rules) if not rule.keeps_all]
        self._chained = len(self._windows) < len(rules)
        self._block_size = block_size
        self._pool = pool
        self._retained: dict[int, Retained] = {}
        self._batch_tier: OrderedDict[PrefixNode, None] = OrderedDict()
        self._live_tier: OrderedDict[PrefixNode, None] = OrderedDict()
        self._retained_tier: OrderedDict[PrefixNode, None] = OrderedDict()

    def first_block(self, group: int, depth: int) -> int:
        """Return the first block that the group needs to resume after `depth` blocks."""
        return self._rules[group].first_read(depth * self._block_size) // self._block_size

    def allocate(self, pages: int) -> list[int]:
        """Return pages for new blocks in use; evict anchors if necessary.

        Raises RuntimeError if fewer are free.
        """
        if pages > self._pool.num_free:
            raise RuntimeError(f"asked for {pages} KV pages with {self._pool.num_free} free")
        while len(self._pool.unused) < pages:
            self._evict()
        return self._pool.take(pages)

    def touch(self, block: PageBlock) -> None:
        """Let one more request use a block."""
        if not block.users:
            self._pool.in_use += len(block.pages)
        block.users += 1

    def free(self, block: PageBlock) -> None:
        """Let one request fewer use a block; drop the block unless an anchor needs it."""
        block.users -= 1
        if block.users:
            return
        self._pool.in_use -= len(block.pages)
        node = block.node
        if node is None:
            self._pool.unused += block.pages
        elif node.blocks[block.group] is not block:
            node.copies.remove(block)
            self._pool.unused += block.pages
        else:
            if self._promote(node, block.group) or not self._is_needed(node, block.group):
                self._drop_block(node, block)
            self._prune(node)

    def match(self, hashes: Sequence[bytes]) -> list[PrefixNode | None]:
        """Return the nodes of a prompt's blocks, as far as a prefix can reach."""
        nodes: list[PrefixNode | None] = []
        for name in hashes:
            node = self.nodes.get(name)
            if node is None and self._chained:
                break
            nodes.append(node)
        return nodes

    def longest_border(self, nodes: Sequence[PrefixNode | None]) -> int:
        """Return after how many of these nodes, from `match`, a request can be resumed."""
        depth = len(nodes)
        while depth and (lacking := self._lacking(nodes, depth)) is not None:
            depth = lacking
        return depth

    def _lacking(self, nodes: Sequence[PrefixNode | None], depth: int) -> int | None:
        """Return the index of a block without which a border cannot be resumed, if there is one.

        No shorter border that includes the block can be resumed either.
        """
        if nodes[depth - 1] is None:
            return depth - 1
        for group in self._windows:
            for index in range(depth - 1, self.first_block(group, depth) - 1, -1):
                node = nodes[index]
                if node is None or node.blocks[group] is None:
                    return index
        return None

    def attach(self, hashes: Sequence[bytes], index: int, blocks: Iterable[PageBlock]) -> None:
        """Cache blocks in use as the content of block `index` of a prompt."""
        node = self.nodes.get(hashes[index])
        if node is None:
            node = self.nodes[hashes[index]] = PrefixNode(hashes[index], index + 1, len(self._rules))
            if self._chained and index:
                _link(self.nodes[hashes[index - 1]], node)
        for block in blocks:
            if block.node is None:
                self._attach_block(node, block)

    def _attach_block(self, node: PrefixNode, block: PageBlock) -> None:
        known = node.blocks[block.group]
        block.node = node
        if known is not None and known.users:
            node.copies.append(block)
            return
        if known is not None:
            self._drop_block(node, known)
        node.blocks[block.group] = block

    def detach(self, block: PageBlock) -> None:
        """Remove a block in use from the cache, with all that is useless without it."""
        node, block.node = block.node, None
        if node is None:
            return
        group = block.group
        if node.blocks[group] is not block:
            node.copies.remove(block)
        elif not self._promote(node, group):
            node.blocks[group] = None
            if self._is_needed(node, group):
                self.drop(node)
            else:
                self._prune(node)

    def drop(self, top: PrefixNode) -> None:
        """Remove a node and all nodes below it."""
        nodes = [top]
        for node in nodes:
            nodes += node.children.values()
        for node in nodes:
            if node.span is not None:
                self._end_anchor(node)
        above = top.parent
        for node in reversed(nodes):
            if self.nodes.get(node.name) is node:
                self._remove(node)
        self._prune(above)

    def add_anchor(self, hashes: Sequence[bytes], depth: int, live: bool) -> PrefixNode | None:
        """Make the border after `depth` blocks an anchor, as last used; None if it lacks blocks."""
        node = self.nodes.get(hashes[depth - 1])
        if node is None:
            return None
        if node.span is None:
            span = self._find_span(hashes, depth)
            if span is None:
                return None
            node.span = span
            for group, needed in self._needed_by(node):
                for each in needed:
                    each.needed[group] += 1
            self._hold_new(node)
        self.use(node, live)
        return node

    def use(self, anchor: PrefixNode, live: bool) -> None:
        """Mark an anchor as last used by a live or a batch request."""
        anchor.live = live
        self._enqueue(anchor)

    def parts(self, hashes: Sequence[bytes], depth: int) -> bool:
        """Return whether a waiting request has the same first `depth` blocks and none the next."""
        counts = self.retain_counts
        return hashes[depth - 1] in counts and (depth >= len(hashes) or hashes[depth] not in counts)

    def retain(self, request_id: int, hashes: list[bytes]) -> None:
        """Evict the anchor that a waiting request would hit last, until `release`."""
        anchor = None
        for name in hashes:
            self.retain_counts[name] = self.retain_counts.get(name, 0) + 1
            node = self.nodes.get(name)
            if node is not None and node.span is not None:
                anchor = node
        self._retained[request_id] = Retained(hashes, None)
        self._hold(self._retained[request_id], anchor)

    def release(self, request_id: int) -> None:
        """Undo `retain`, if it was called."""
        retained = self._retained.pop(request_id, None)
        if retained is None:
            return
        self._hold(retained, None)
        for name in retained.hashes:
            self.retain_counts[name] -= 1
            if not self.retain_counts[name]:
                del self.retain_counts[name]

    def _hold_new(self, anchor: PrefixNode) -> None:
        """Let the waiting requests that would hit a new anchor hold it."""
        if anchor.name in self.retain_counts:
            for retained in self._retained.values():
                is_longer = retained.anchor is None or retained.anchor.depth < anchor.depth
                if is_longer and retained.hashes[anchor.depth - 1 : anchor.depth] == [anchor.name]:
                    self._hold(retained, anchor)

    def _hold(self, retained: Retained, anchor: PrefixNode | None) -> None:
        before, retained.anchor = retained.anchor, anchor
        if before is not None:
            before.held -= 1
            if not before.held and before.span is not None:
                self._enqueue(before)
        if anchor is not None:
            anchor.held += 1
            if anchor.held == 1:
                self._enqueue(anchor)

    def _enqueue(self, anchor: PrefixNode) -> None:
        """Put an anchor at the end of its tier."""
        if anchor.tier is not None:
            del anchor.tier[anchor]
        unretained = self._live_tier if anchor.live else self._batch_tier
        anchor.tier = self._retained_tier if anchor.held else unretained
        anchor.tier[anchor] = None

    def _evict(self) -> None:
        tier = self._batch_tier or self._live_tier or self._retained_tier
        anchor = next(iter(tier))
        self._end_anchor(anchor)
        self._prune(anchor)

    def _end_anchor(self, anchor: PrefixNode) -> None:
        """Free what only this anchor needs of windows; waiting requests hold the anchor before."""
        for group, needed in self._needed_by(anchor):
            for node in needed:
                node.needed[group] -= 1
                block = node.blocks[group]
                if block is not None and not block.users and not node.needed[group]:
                    self._drop_block(node, block)
        span, anchor.span = anchor.span, None
        if anchor.tier is not None:
            del anchor.tier[anchor]
            anchor.tier = None
        if anchor.held:
            self._hold_before(anchor)
        if not self._chained:
            for node in (span or [])[:-1]:
                self._prune(node)

    def _hold_before(self, anchor: PrefixNode) -> None:
        before = anchor.parent
        while before is not None and before.span is None:
            before = before.parent
        for retained in self._retained.values():
            if retained.anchor is anchor:
                self._hold(retained, before)

    def _find_span(self, hashes: Sequence[bytes], depth: int) -> list[PrefixNode] | None:
        """Return the nodes that windows need to resume a border; None if a block is not cached."""
        low = min((self.first_block(group, depth) for group in self._windows), default=depth)
        span = [node for name in hashes[low:depth] if (node := self.nodes.get(name)) is not None]
        if len(span) < depth - low:
            return None
        for group in self._windows:
            if any(node.blocks[group] is None for node in span[self.first_block(group, depth) - low :]):
                return None
        if not self._chained:
            for parent, child in pairwise(span):
                _link(parent, child)
        return span

    def _needed_by(self, anchor: PrefixNode) -> Iterable[tuple[int, list[PrefixNode]]]:
        """Yield each window's group with the nodes whose blocks the anchor needs."""
        span = anchor.span or []
        low = anchor.depth - len(span)
        for group in self._windows:
            yield group, span[self.first_block(group, anchor.depth) - low :]

    def _is_needed(self, node: PrefixNode, group: int) -> bool:
        """Return whether a cached block is of use to others than those that use it now."""
        return self._rules[group].keeps_all or bool(node.needed[group])

    def _promote(self, node: PrefixNode, group: int) -> bool:
        """Cache a copy in use in place of the node's block; return False if there is none."""
        copy = next((each for each in node.copies if each.group == group), None)
        if copy is not None:
            node.copies.remove(copy)
            node.blocks[group] = copy
        return copy is not None

    def _drop_block(self, node: PrefixNode, block: PageBlock) -> None:
        """Remove a block without users."""
        block.node = None
        if node.blocks[block.group] is block:
            node.blocks[block.group] = None
        self._pool.unused += block.pages

    def _prune(self, node: PrefixNode | None) -> None:
        """Remove a node that is of no use, and then its parents as far as they are not either."""
        while node is not None and self._is_useless(node):
            parent = node.parent
            self._remove(node)
            node = parent

    def _is_useless(self, node: PrefixNode) -> bool:
        below = self._chained and node.children
        return not (node.span is not None or below or any(node.needed) or node.in_use)

    def _remove(self, node: PrefixNode) -> None:
        for block in (*node.blocks, *node.copies):
            if block is not None:
                block.node = None
                if not block.users:
                    self._pool.unused += block.pages
        node.blocks, node.copies = [None] * len(self._rules), []
        del self.nodes[node.name]
        if node.parent is not None:
            del node.parent.children[node.name]
        node.parent = None
        for child in node.children.values():
            child.parent = None
        node.children = {}


def _link(parent: PrefixNode, child: PrefixNode) -> None:
    child.parent = parent
    parent.children[child.name] = child
