"""Who holds which block of the KV cache, which hold findable content, and which of the free ones go
first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, names and the free list of all blocks but the null block.

    Of the free blocks those without a name go first. Then, each time by least recent use, named
    content that batch requests left and nobody waits for, what live requests left, and at last what
    waiting requests want, by name: so what a batch is done with pushes out neither the prefix of
    those that come next nor what a live call may ask for again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._unnamed = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._left: OrderedDict[int, None] = OrderedDict()  # by batch requests
        self._kept: OrderedDict[int, None] = OrderedDict()  # of live ones
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._shelves = (self._left, self._kept, self._wanted)
        # Where each free and named block stands
        self._shelf: list[OrderedDict[int, None] | None] = [None] * num_blocks
        self._wants: dict[bytes, int] = {}  # how many wait for each name

    @property
    def free(self) -> int:
        """Blocks that nobody holds, those with findable content included."""
        return len(self._unnamed) + len(self._left) + len(self._kept) + len(self._wanted)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks with one holder each. Raises RuntimeError when fewer are free."""
        if count > self.free:
            raise RuntimeError(f"asked for {count} KV blocks with {self.free} free")
        blocks = []
        for _ in range(count):
            if self._unnamed:
                block = self._unnamed.pop()
            else:
                block, _ = (self._left or self._kept or self._wanted).popitem(last=False)
                self._shelf[block] = None
                self.unname(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that have holders or findable content."""
        for block in blocks:
            shelf = self._shelf[block]
            if shelf is not None:
                del shelf[block]
                self._shelf[block] = None
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int], live: bool) -> None:
        """Takes a holder from each of a request's blocks.

        Its last blocks become the first to go: a prefix is of use without its end.
        """
        holders, names, wants, shelf_of, unwanted = (
            self._holders,
            self._names,
            self._wants,
            self._shelf,
            self._kept if live else self._left,
        )
        for block in reversed(blocks):
            holders[block] -= 1
            if not holders[block]:
                name = names[block]
                if name is None:
                    self._unnamed.append(block)
                else:
                    shelf = shelf_of[block] = self._wanted if name in wants else unwanted
                    shelf[block] = None

    def want(self, names: Sequence[bytes]) -> None:
        """A request waits for blocks with these names, in the order of its prompt, which need not
        be there yet.
        """
        for name in reversed(names):
            waiting = self._wants.get(name, 0)
            self._wants[name] = waiting + 1
            if not waiting:
                self._move(name, self._wanted)

    def unwant(self, names: Sequence[bytes]) -> None:
        """It waits no longer: what is free and nobody else waits for counts as left over."""
        for name in reversed(names):
            waiting = self._wants[name] - 1
            if waiting:
                self._wants[name] = waiting
            else:
                del self._wants[name]
                self._move(name, self._left)

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
        """Makes a block's content unfindable, if it was findable; such a block is held, or about to
        be.
        """
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None

    def holders_of(self, block: int) -> int:
        """How many hold it."""
        return self._holders[block]

    def wants(self) -> dict[bytes, int]:
        """How many wait for each name, for integrity checks."""
        return dict(self._wants)

    def names(self) -> dict[bytes, int]:
        """Every name with its block, for integrity checks."""
        return dict(self._by_name)

    def holders(self) -> list[int]:
        """Holders by block, for integrity checks."""
        return list(self._holders)

    def check(self) -> None:
        """Raises RuntimeError unless the free list holds exactly the blocks without holders, and
        names and blocks agree.
        """
        free = sorted(chain(self._unnamed, *self._shelves))
        if free != [block for block in range(1, self.num_blocks) if self._holders[block] == 0]:
            raise RuntimeError("the free list of KV blocks differs from the blocks without holders")
        if any(count < 0 for count in self._holders) or self._holders[NULL_BLOCK]:
            raise RuntimeError("a KV block was given back more often than taken, or the null block was taken")
        if self._by_name != {name: block for block, name in enumerate(self._names) if name is not None}:
            raise RuntimeError("names of KV blocks and blocks disagree")
        if any(self._names[block] is not None for block in self._unnamed) or any(
            self._names[block] is None for block in chain(*self._shelves)
        ):
            raise RuntimeError("a free KV block stands in the wrong list")
        if any(self._shelf[block] is not shelf for shelf in self._shelves for block in shelf):
            raise RuntimeError("a free KV block stands elsewhere than is noted")
        if {name for name in self._wants if self._is_free(name)} != {self._names[block] for block in self._wanted}:
            raise RuntimeError("the free KV blocks that are wanted differ from those kept for it")

    def _is_free(self, name: bytes) -> bool:
        block = self._by_name.get(name)
        return block is not None and not self._holders[block]

    def _move(self, name: bytes, shelf: OrderedDict[int, None]) -> None:
        """Puts the block of that name, if it is free, on another shelf, as the one used last."""
        block = self._by_name.get(name)
        if block is not None and (now := self._shelf[block]) is not None:
            del now[block]
            shelf[block] = None
            self._shelf[block] = shelf
