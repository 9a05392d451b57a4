"""Queue waiting and running requests: assign slots and blocks, and preempt."""

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import accumulate, islice

from workers.engine.messages.core import Stats
from workers.engine.scheduling.admission import AdmissionPolicy
from workers.engine.scheduling.cache import Prefix, SchedulerCache
from workers.engine.scheduling.live_shares import PRIORITY, LiveShares
from workers.engine.scheduling.request import RequestState
from workers.engine.scheduling.slots import SlotPool

BATCH_SHARE = 0.1
"""The share of slots, blocks and step time that live requests leave to batch requests; claims keep
as much for batches.
"""


@dataclass(slots=True)
class PriorityClass:
    """The live or the batch requests; each list is ordered by descending priority."""

    running: list[RequestState] = field(default_factory=list)
    waiting: list[RequestState] = field(default_factory=list)


class RequestQueues:
    """Hold live and batch requests; the running ones have a slot and blocks.

    If slots or blocks run out, the running request of the lowest priority is preempted: batch
    before live, then the live one of the highest place (`live_shares.py`), then the highest
    priority number, then the newest. It keeps its tokens and waits for its turn. So the request of
    the highest priority always continues, and none of equal priority starves.

    While batch requests run or wait, live ones leave them `BATCH_SHARE` of the slots and blocks: no
    more live requests start, and they preempt no batch request within the share. A live request
    that runs without other live ones may use everything.
    """

    def __init__(self, kv_cache: SchedulerCache, slots: SlotPool, policy: AdmissionPolicy, stats: Stats) -> None:
        self.live = PriorityClass()
        self.batch = PriorityClass()
        self.expects_live = False  # a live request waits elsewhere and will be added
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._slots = slots
        self._policy = policy
        self._stats = stats
        self._shares = LiveShares(slots.size)
        self._batch_slots = max(1, int(BATCH_SHARE * slots.size))
        self._batch_pages = int(BATCH_SHARE * kv_cache.num_pages)

    @property
    def has_live(self) -> bool:
        """Return whether a live request runs or waits."""
        return bool(self.live.running or self.live.waiting or self.expects_live)

    @property
    def running(self) -> list[RequestState]:
        return self.live.running + self.batch.running

    def add(self, request: RequestState) -> None:
        """Add a new request to the waiting requests."""
        self._shares.add(request)
        self._wait(request)

    def share_live(self, budget: int) -> None:
        """Take slots and blocks back from live requests beyond the share of their tenant or call.

        They are for waiting requests within theirs, as many as `budget` tokens can start.
        """
        live = self.live
        if self._shares.arrange(live.running, live.waiting) and live.waiting:
            for _ in range(self._beyond_share(budget)):
                self._preempt(live.running[-1])
            self._take_blocks_back(live.waiting[0])

    def _beyond_share(self, budget: int) -> int:
        """Return how many slots are to be taken back."""
        count = tokens = 0
        without_slot = islice(self.live.waiting, max(0, self._live_room()), None)
        for request, victim in zip(without_slot, reversed(self.live.running), strict=False):
            if victim.place <= request.place or tokens >= budget:
                break
            count += 1
            tokens += request.known
        return count

    def _take_blocks_back(self, request: RequestState) -> None:
        """Preempt live requests until a waiting one has blocks, if these are within the share of
        its tenant.
        """
        running, kv_cache = self.live.running, self._kv_cache
        need = kv_cache.pages_for(request.known) + len(running) * kv_cache.block_pages
        if need > kv_cache.num_pages * self._shares.part_of(request):
            return
        of_batch = sum(other.pages_held for other in self.batch.running)
        while running and running[-1].place > request.place:
            if self._soon_free() + of_batch >= need:
                break
            self._preempt(running[-1])

    def _wait(self, request: RequestState) -> None:
        self._shares.changed |= request.live
        insort(self._class_of(request).waiting, request, key=PRIORITY)
        if request.next_score == sys.maxsize:
            self._kv_cache.retain(request)

    def enter(self, request: RequestState, prefix: Prefix, step: int) -> None:
        """Assign a slot and `prefix` to a waiting request, and run it."""
        priority_class = self._class_of(request)
        self._remove(request)
        self._shares.changed |= request.live
        revived = self._kv_cache.count_free(prefix)
        self._kv_cache.admit(request, prefix)
        self._kv_cache.release(request)
        request.slot, request.entered = self._slots.free.pop(), step
        self._policy.enter(request, step, revived)
        self._count_hit(request, 1)
        insort(priority_class.running, request, key=PRIORITY)

    def undo_enter(self, request: RequestState) -> None:
        """Move a request that no launched step contains back to the waiting requests."""
        self._count_hit(request, -1)
        request.last_step = -1
        self._remove(request)
        self._wait_again(request)

    def end(self, request: RequestState) -> None:
        """Remove a request that has ended."""
        self._shares.remove(request)
        self._shares.changed |= request.live
        self._policy.learn(request)
        self._remove(request)
        if request.slot >= 0:
            self._give_up(request)
        else:
            self._kv_cache.release(request)

    def find_slot(self, request: RequestState, budget: int) -> bool:
        """Return whether a slot is free.

        For live requests, batch ones are preempted, as many at once as `budget` tokens can admit.
        While any live request waits, batch requests start only within their share.
        """
        if not request.live and self.live.waiting and len(self.batch.running) >= self._batch_slots:
            return False
        if request.live:
            room = self._live_room()
            if room <= 0:
                return False
            if not self._slots.free:
                self._preempt_for_slots(min(room, self._startable(budget)) - len(self._slots.returning))
        return bool(self._slots.free)

    def _live_room(self) -> int:
        """Return how many more live requests may run."""
        kept = min(self._batch_slots, len(self.batch.running) + len(self.batch.waiting))
        return max(1, self._slots.size - kept) - len(self.live.running)

    def kept_for_batch(self, request: RequestState) -> int:
        """Return how many free pages a waiting request must leave to batch requests."""
        if not request.live or not self.live.running or not self.batch.waiting:
            return 0
        return max(0, self._batch_pages - sum(other.pages_held for other in self.batch.running))

    def has_room(self, request: RequestState, prefix: Prefix, step: int) -> bool:
        """Return whether a batch request that can begin is admitted; a single request always is."""
        return not self.batch.running or self._policy.has_room(
            request, prefix, step, self.running, self._slots.returning_own_pages
        )

    def make_room(self, need: int, request: RequestState, step: int) -> bool:
        """Preempt requests of the lowest priority until `need` pages are free.

        For a running request, these are the requests after it and finally itself, except those that
        already have a row in `step`. For a waiting live request, they are batch requests only.
        Returns False if the pages are not free now; they may be once a launched step is retired.
        """
        if request.slot < 0:
            victims = self.batch.running[self._protected(request) :]
            in_batch = sum(other.pages_held for other in victims)
            if self._soon_free() + in_batch < need:
                return False
        while self._pool.num_free < need:
            victim = self._victim(request)
            enough = self._soon_free() >= need
            if enough or victim is None or victim.last_step == step:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def await_pages(self) -> bool:
        """Return whether slots or pages become free once the launched steps are retired."""
        return bool(self._slots.returning) or self._soon_free() > self._pool.num_free

    def _soon_free(self) -> int:
        """Return how many pages are free once the launched steps are retired."""
        count, retired = self._kv_cache.count_returning, self._slots.retired_step
        of_running = count(self.live.running, retired) + count(self.batch.running, retired)
        return self._pool.num_free + self._slots.returning_pages + of_running

    def _victim(self, request: RequestState) -> RequestState | None:
        """Return the next request to preempt for one that needs blocks; it may be that request
        itself.
        """
        if len(self.batch.running) > self._protected(request):
            return self.batch.running[-1]
        return self.live.running[-1] if request.slot >= 0 else None

    def _protected(self, request: RequestState) -> int:
        """Return how many batch requests, counted from the first, are not preempted for a request.

        A live request that runs beside other live ones preempts none within the share, and leaves
        at least one.
        """
        if not request.live or len(self.live.running) == (request.slot >= 0):
            return 0
        pages = accumulate(other.pages_held for other in self.batch.running[: self._batch_slots])
        return max(1, sum(total <= self._batch_pages for total in pages))

    def _startable(self, budget: int) -> int:
        """Return how many waiting live requests begin within `budget` tokens."""
        ends = accumulate(request.known for request in self.live.waiting)
        return min(1 + sum(end < budget for end in ends), len(self.live.waiting))

    def _preempt_for_slots(self, count: int) -> None:
        for _ in range(min(count, len(self.batch.running))):
            self._preempt(self.batch.running[-1])

    def _preempt(self, victim: RequestState) -> None:
        self._class_of(victim).running.pop()
        victim.reached = max(victim.reached, victim.computed)
        self._wait_again(victim)
        self._stats.preemptions += 1

    def _wait_again(self, request: RequestState) -> None:
        self._wait(request)
        self._give_up(request)

    def _give_up(self, request: RequestState) -> None:
        if request.computed >= request.hash_at:
            self._kv_cache.cache_blocks(request)
        self._policy.leave(request)
        self._slots.give_up(request)

    def _count_hit(self, request: RequestState, sign: int) -> None:
        self._stats.prefix_hit_tokens += sign * request.computed
        self._stats.recomputed_tokens += sign * max(0, request.reached - request.computed)

    def _remove(self, request: RequestState) -> None:
        priority_class = self._class_of(request)
        queue = priority_class.running if request.slot >= 0 else priority_class.waiting
        del queue[bisect_left(queue, request.priority, key=PRIORITY)]

    def _class_of(self, request: RequestState) -> PriorityClass:
        return self.live if request.live else self.batch
