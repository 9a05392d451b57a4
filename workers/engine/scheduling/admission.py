"""Decide which batch requests may start, in addition to the scheduler's general rule.

By that rule a waiting request can start if a slot is free, and if pages are free for its known
tokens beside those that the running requests may soon need.
"""

from collections.abc import Sequence
from typing import Protocol

from workers.engine.scheduling.cache import Prefix, SchedulerCache
from workers.engine.scheduling.forecast import AdmissionForecast
from workers.engine.scheduling.request import RequestState

_MAX_DEFERRED_STEPS = 32  # steps


class AdmissionPolicy(Protocol):
    """Decide whether a batch request that can begin is admitted.

    `step_cost_tokens` is the measured number of prompt tokens that take as long as a step without
    any.
    """

    step_cost_tokens: float

    def has_room(
        self, request: RequestState, prefix: Prefix, step: int, running: Sequence[RequestState], returning: int
    ) -> bool:
        """Return whether a request that shares `prefix` is admitted beside `running`.

        `returning`: pages in use that no running request owns.
        """

    def enter(self, request: RequestState, step: int, revived: int) -> None:
        """Add a request that got a slot and a prefix, of which `revived` pages were free."""

    def leave(self, request: RequestState) -> None:
        """Remove a request that is about to lose its slot."""

    def learn(self, request: RequestState) -> None:
        """Take note of a request that ended."""


class PlainAdmission:
    """Admits every request that can begin."""

    step_cost_tokens = 0.0  # not used

    def has_room(self, *_: object) -> bool:
        return True

    def enter(self, *_: object) -> None:
        pass

    leave = learn = enter


def choose_policy(kv_cache: SchedulerCache, max_num_seqs: int, max_model_len: int) -> AdmissionPolicy:
    """Return the plain rule if the longest request fits into every slot, else the forecast."""
    if max_num_seqs * kv_cache.pages_for(max_model_len) < kv_cache.num_pages:
        return PlainAdmission()
    return AdmissionForecast(kv_cache, max_model_len)


class AdmissionBatching:
    """Defer batch requests while slots or pages are scarce, so that more start at once later.

    They wait until `size` slots and `pages` pages are free, for at most `_MAX_DEFERRED_STEPS`
    steps. Prompts are then computed together in a few steps, which pays if steps without a prompt
    are much cheaper.
    """

    def __init__(self, size: int, pages: int) -> None:
        self._size = size
        self._pages = pages
        self._deferred_steps = 0

    def defers(self, free_slots: int, free_pages: int, running: bool) -> bool:
        """Return whether batch requests wait in this step. `running`: whether any request runs."""
        scarce = free_slots < self._size or free_pages < self._pages
        defers = self._size > 1 and scarce and running and self._deferred_steps < _MAX_DEFERRED_STEPS
        self._deferred_steps = self._deferred_steps + 1 if defers else 0
        return defers
