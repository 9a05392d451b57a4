"""Track the slots of the device, and the device time used in each."""

from typing import Any, NamedTuple

import numpy as np

from workers.engine.messages.step import StepPlan
from workers.engine.scheduling.cache import SchedulerCache
from workers.engine.scheduling.request import RequestState


class SlotPool:
    """Hold the free slots, and the slots and blocks that requests gave up.

    The latter are returning: they become free once the last step that uses them has been retired.
    """

    def __init__(self, num_slots: int, kv_cache: SchedulerCache) -> None:
        self.size = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.returning: list[_Returning] = []
        self.retired_step = 0
        self._kv_cache = kv_cache
        # Not yet added to the request that last had the slot; index -1 stands for no request,
        # always 0
        self._device_seconds = np.zeros(num_slots + 1)

    @property
    def returning_pages(self) -> int:
        return sum(returning.pages for returning in self.returning)

    @property
    def returning_own_pages(self) -> int:
        """Return how many returning pages no other request uses."""
        return sum(returning.own_pages for returning in self.returning)

    def give_up(self, request: RequestState) -> None:
        """Take slot and blocks from a request."""
        self.settle(request, request.slot)
        pages, own_pages = request.pages_held, request.pages_held - request.shared
        blocks = self._kv_cache.give_up(request)
        returning = _Returning(request.last_step, request.slot, blocks, pages, own_pages, request)
        request.leave()
        self._return(returning)

    def retire(self, step: int) -> None:
        """Free the slots and blocks last used by `step` or an earlier one."""
        self.retired_step = step
        due = [returning for returning in self.returning if returning.after <= step]
        if due:
            self.returning = [returning for returning in self.returning if returning.after > step]
            for returning in due:
                self._free(returning)

    def undo(self, step: int, before: int) -> None:
        """Free the slots and blocks last used by a step that was not launched, once `before` is
        retired.
        """
        given_up, self.returning = self.returning, []
        for returning in given_up:
            self._return(returning._replace(after=before) if returning.after == step else returning)

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Divide the time of a step, not yet retired, among its slots by their tokens."""
        self._device_seconds[plan.slots] += plan.counts * (seconds / plan.counts.sum())

    def settle(self, request: RequestState, slot: int) -> None:
        """Add the slot's time to its current or last request."""
        request.device_seconds += float(self._device_seconds[slot])
        self._device_seconds[slot] = 0.0

    def seconds_so_far(self, requests: list[RequestState]) -> dict[int, float]:
        """Return the device seconds of each of these requests by id, with one access to the
        array.
        """
        unsettled = self._device_seconds[[request.slot for request in requests]].tolist()
        return {each.id: each.device_seconds + more for each, more in zip(requests, unsettled, strict=True)}

    def _return(self, returning: "_Returning") -> None:
        if returning.after <= self.retired_step:
            self._free(returning)
        else:
            self.returning.append(returning)

    def _free(self, returning: "_Returning") -> None:
        self.settle(returning.request, returning.slot)
        self._kv_cache.free(returning.blocks, returning.request.live)
        self.free.append(returning.slot)


class _Returning(NamedTuple):
    """A slot and blocks that become free once step `after` has been retired."""

    after: int
    slot: int
    blocks: list[Any]
    pages: int
    own_pages: int
    request: RequestState
