"""The KV cache as the rest of the scheduler sees it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.step import NewBlocks
from workers.engine.scheduling.request import RequestState

Prefix = list[Any]
"""A cached prefix: one entry for each of its blocks, of the cache's own kind."""


class FreePages(Protocol):
    """The pages of a cache, as far as they are counted."""

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""


class SchedulerCache(Protocol):
    """Pages for the blocks of requests, and prefixes that requests share.

    A block has `block_size` tokens, in each group of layers. It takes `block_pages` pages in all
    groups together. A page is free if no request uses it, even if its content is cached.
    """

    block_size: int
    block_pages: int
    num_pages: int  # with the null page
    max_tokens: int  # of a single request
    frees_old_blocks: bool  # while a request runs

    @property
    def pool(self) -> FreePages:
        """Return the pages."""

    def find_prefix(self, request: RequestState) -> Prefix:
        """Return the longest cached prefix of the request.

        It never includes the last token, which must be computed to sample.
        """

    def count_free(self, prefix: Prefix) -> int:
        """Return how many pages of a prefix are free."""

    def retain(self, request: RequestState) -> None:
        """Evict the cached prefix of a request that begins to wait last, until `release`."""

    def release(self, request: RequestState) -> None:
        """Undo `retain` for a request that no longer waits."""

    def admit(self, request: RequestState, prefix: Prefix) -> None:
        """Assign `prefix`, the result of the latest `find_prefix`, to a request without blocks."""

    def held_blocks(self, request: RequestState) -> list[NewBlocks]:
        """Return the blocks of a request that was just admitted."""

    def reach(self, request: RequestState, end: int) -> tuple[int, int]:
        """Return up to where the request may be computed, `end` at most, and the pages it takes.

        It is as far as the free pages reach. If they are too few for any progress, it is where
        pages have to be made free for.
        """

    def grow(self, request: RequestState, end: int) -> list[NewBlocks]:
        """Allocate blocks for the request's first `end` tokens; return the new ones.

        Raises RuntimeError if too few pages are free.
        """

    def cache_blocks(self, request: RequestState) -> None:
        """Cache the request's full blocks.

        Their tokens are computed (or launched), and the host has received them.
        """

    def forget(self, request: RequestState) -> None:
        """Remove all that the request has computed from the cache, and keep it out."""

    def truncate(self, request: RequestState, computed: int) -> None:
        """Take a request back to its first `computed` tokens; later ones were not computed."""

    def step_back(self, request: RequestState) -> None:
        """Let a request compute its last token once more; no other request may find its block."""

    def free_old_blocks(self, request: RequestState, end: int, step: int) -> None:
        """Free the blocks that no later token reads, once `step` has computed `end` tokens."""

    def count_returning(self, requests: Sequence[RequestState], retired_step: int) -> int:
        """Return how many pages become free by `free_old_blocks` once all steps are retired."""

    def give_up(self, request: RequestState) -> list[Any]:
        """Return the blocks of a request that is about to leave, for `free`."""

    def free(self, blocks: list[Any], live: bool) -> None:
        """Free the blocks that a request gave up, once no launched step uses them."""

    def pages_for(self, tokens: int) -> int:
        """Return the most pages of a request while its first `tokens` tokens are computed."""

    def pages_to_begin(self, request: RequestState, prefix: Prefix) -> int:
        """Return how many free pages the known tokens of a request take after a prefix."""

    def pages_to_finish(self, request: RequestState) -> int:
        """Return how many more pages the known tokens of a running request take."""

    def pages_at(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the pages of a decoding request, by its number of tokens."""

    def shared_pages(self, prefix: Prefix) -> int:
        """Return how many pages a request shares as long as it runs if it has this prefix."""

    def count_shared(self, request: RequestState) -> int:
        """Return how many of these pages other requests use."""
