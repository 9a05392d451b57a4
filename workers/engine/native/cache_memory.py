"""Memory for blocks of the KV cache before a step writes them.

The system provides pages when they are touched. This takes a tenth of a millisecond for 2 MiB, and
several milliseconds in a virtual machine whose host must first find the memory. While the engine is
idle, it populates pages for the next burst of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from workers.engine.messages.step import StepPlan
from workers.engine.native.memory import populate

logger = logging.getLogger(__name__)

# Populated at once in one layer, so that an arriving request waits only a few milliseconds
_PIECE_BYTES = 2 << 20
_MOST_BYTES = 1 << 30
_SPARED_BYTES = 2 << 30  # memory of the machine or container that stays free


class CacheMemory:
    """Populates blocks after the used ones: as many as are used, up to 1 GiB.

    Blocks are used in ascending order as long as there are unused ones. Populating ends for good if
    the system cannot do it, or if less than 2 GiB of memory are left.
    """

    def __init__(self, caches: Sequence[Tensor], available: Callable[[], int | None]) -> None:
        """Start with no used blocks.

        `caches` are one per layer of a block, [num_blocks, …]. `available` returns the bytes that
        are free, None if unknown.
        """
        self._caches, self._available = caches, available
        self._num_blocks = len(caches[0])
        block_bytes = caches[0].nbytes // self._num_blocks
        self._piece = -(-_PIECE_BYTES // block_bytes)
        self._most_ahead = _MOST_BYTES // (block_bytes * len(caches))
        self._used = self._populated = self._layer = 0

    def use(self, plan: StepPlan) -> None:
        """Record the blocks that a step will write."""
        for new in plan.new_blocks:
            self._used = max(self._used, 1 + max(new.block_ids))

    @property
    def is_behind(self) -> bool:
        """Return whether `populate` has something to do."""
        return self._populated < min(self._num_blocks, self._used + min(self._used, self._most_ahead))

    def populate(self) -> None:
        """Populate some more blocks of one layer."""
        if not self._layer:
            self._populated = max(self._populated, self._used)
        available = self._available()
        if available is not None and available < _SPARED_BYTES:
            self._end(f"less than {_SPARED_BYTES >> 30} GiB are left")
        elif not populate(self._caches[self._layer][self._populated : self._populated + self._piece]):
            self._end("the system does not populate memory")
        else:
            self._layer = (self._layer + 1) % len(self._caches)
            self._populated += 0 if self._layer else self._piece

    def _end(self, reason: str) -> None:
        logger.info("the KV cache is no longer populated while the engine is idle; bursts may take longer: %s", reason)
        self._populated = self._num_blocks
