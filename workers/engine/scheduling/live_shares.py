"""Order live requests so that tenants share the slots by weight, and no call takes most of them.

Each live request has a place: its number among those of its tenant, from 0 on, divided by the
tenant's weight, plus 1. The requests of the lowest places have a right to the slots. So a tenant
keeps as many as it can use, up to its share, and more only while no other tenant waits; and no
tenant has less than one, however small its weight, unless there are more tenants than slots.

Within a tenant, requests that run come first, then the request's priority and its arrival decide.
But the choices or texts of one call are numbered in groups of an eighth of the slots, and those of
a later group come after all requests of an earlier one.
"""

import math
from collections import Counter, defaultdict
from itertools import chain
from operator import attrgetter

from workers.engine.scheduling.request import RequestState

PRIORITY = attrgetter("priority")
_GROUPS = 8  # of the requests of a call that could fill all slots
_AT_ONCE = 512  # requests; more get their places after so many times more plans


class LiveShares:
    """Count live requests by tenant and by call, and give them their places."""

    def __init__(self, slots: int) -> None:
        self.changed = False  # whether places may be wrong
        self.matter = False  # whether places differ
        self._group = max(1, slots // _GROUPS)
        self._tenants: Counter[str] = Counter()
        self._calls: Counter[str | int] = Counter()
        self._weights: dict[str, float] = {}  # of the tenants
        self._plans_left = 0  # until requests may get places again

    def add(self, request: RequestState) -> None:
        if request.live:
            if self.matter:
                request.set_place(math.inf)
            self._tenants[request.tenant] += 1
            self._weights[request.tenant] = request.weight
            self._calls[request.call] += 1

    def remove(self, request: RequestState) -> None:
        if request.live:
            self._tenants[request.tenant] -= 1
            self._calls[request.call] -= 1
            if not self._tenants[request.tenant]:
                del self._tenants[request.tenant], self._weights[request.tenant]
            if not self._calls[request.call]:
                del self._calls[request.call]

    def arrange(self, running: list[RequestState], waiting: list[RequestState]) -> bool:
        """Give the live requests their places, and sort both lists by them.

        Call it once for each plan. Returns whether places matter and have just been given.
        """
        self._plans_left -= 1
        if not self.changed or self._plans_left >= 0:
            return False
        self.changed, mattered = False, self.matter
        large = len(self._calls) > 1 and max(self._calls.values()) > self._group
        self.matter = len(self._tenants) > 1 or large
        if self.matter:
            self._give_places(running, waiting)
            self._plans_left = (len(running) + len(waiting)) // _AT_ONCE
        elif mattered:
            for request in chain(running, waiting):
                request.set_place(0.0)
        if self.matter or mattered:
            running.sort(key=PRIORITY)
            waiting.sort(key=PRIORITY)
        return self.matter

    def part_of(self, request: RequestState) -> float:
        """Return the share of the request's tenant, a number up to 1."""
        return self._weights[request.tenant] / sum(self._weights.values())

    def _give_places(self, running: list[RequestState], waiting: list[RequestState]) -> None:
        of_call: Counter[str | int] = Counter()
        of_tenant: defaultdict[str, list[tuple[int, bool, tuple[int, int], RequestState]]] = defaultdict(list)
        for request in chain(running, waiting):
            group = of_call[request.call] // self._group
            of_call[request.call] += 1
            of_tenant[request.tenant].append((group, request.slot < 0, request.rank, request))
        for members in of_tenant.values():
            members.sort(key=lambda member: member[:3])
            for number, (*_, request) in enumerate(members):
                request.set_place(1 + number / request.weight)
