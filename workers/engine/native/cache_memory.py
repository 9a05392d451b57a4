"""Memory for blocks of the KV cache before a step writes them.

The system gives memory as it is touched, which takes a tenth of a millisecond for 2 MiB, and
several milliseconds in a virtual machine whose host has to find it first. Where the engine is idle
it asks for what the next burst of requests will write, so that their steps need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.messages.step import StepPlan
from workers.engine.native.memory import populate

# At once, of one layer, so that a request that arrives meanwhile waits for milliseconds at most
_PIECE_BYTES = 2 << 20
_MOST_BYTES = 1 << 30


class CacheMemory:
    """Has memory for the blocks that were ever used, and for as many more, up to 1 GiB.

    Blocks are used in rising order as long as there are unused ones. `caches` are one per layer,
    [num_blocks, …].
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._caches = caches
        self._num_blocks = len(caches[0])
        block_bytes = caches[0].nbytes // self._num_blocks
        self._piece = -(-_PIECE_BYTES // block_bytes)
        self._most_ahead = _MOST_BYTES // (block_bytes * len(caches))
        self._used = self._populated = self._layer = 0

    def use(self, plan: StepPlan) -> None:
        """Note the blocks that a step is about to write."""
        for new in plan.new_blocks:
            self._used = max(self._used, 1 + max(new.block_ids))

    @property
    def wanting(self) -> bool:
        """Return whether `populate` has something to do."""
        return self._populated < min(self._num_blocks, self._used + min(self._used, self._most_ahead))

    def populate(self) -> None:
        """Get the memory of some more blocks of one layer."""
        if not self._layer:
            self._populated = max(self._populated, self._used)
        populate(self._caches[self._layer][self._populated : self._populated + self._piece])
        self._layer = (self._layer + 1) % len(self._caches)
        if not self._layer:
            self._populated += self._piece
