"""The requests that wait and those that run: who gets a slot and blocks, and who loses them."""

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

from workers.engine.messages.core import Stats
from workers.engine.scheduling.admission import AdmissionPolicy
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.request import RequestState
from workers.engine.scheduling.slots import SlotPool

_PRIORITY = attrgetter("priority")


@dataclass(slots=True)
class PriorityClass:
    """The live or the batch requests, in each list the highest priority first."""

    running: list[RequestState] = field(default_factory=list)
    waiting: list[RequestState] = field(default_factory=list)


class RequestQueues:
    """Live and batch requests; the running ones have a slot and blocks.

    Where these run out, the running request of the lowest priority is preempted: batch before live,
    then the highest priority number, then the newest. It keeps its tokens and waits for its turn.
    So the request of the highest priority always goes on, and none of equal priority starves.
    """

    def __init__(self, kv_cache: KVCache, slots: SlotPool, policy: AdmissionPolicy, stats: Stats) -> None:
        self.live = PriorityClass()
        self.batch = PriorityClass()
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._slots = slots
        self._policy = policy
        self._stats = stats

    @property
    def running(self) -> list[RequestState]:
        return self.live.running + self.batch.running

    def wait(self, request: RequestState) -> None:
        """Add a request to the waiting ones."""
        insort(self._class_of(request).waiting, request, key=_PRIORITY)
        if request.next_score == sys.maxsize:
            self._kv_cache.retain(request)

    def enter(self, request: RequestState, prefix: list[int], step: int) -> None:
        """Give the first waiting request of a class a slot and `prefix`, and let it run."""
        priority_class = self._class_of(request)
        del priority_class.waiting[0]
        revived = self._pool.count_free(prefix)
        self._kv_cache.admit(request, prefix)
        self._kv_cache.release(request)
        request.slot = self._slots.free.pop()
        self._policy.enter(request, step, revived)
        self._count_hit(request, 1)
        insort(priority_class.running, request, key=_PRIORITY)

    def undo_enter(self, request: RequestState) -> None:
        """Let a request that no launched step contains wait again."""
        self._count_hit(request, -1)
        request.last_step = -1
        self._remove(request)
        self._wait_again(request)

    def end(self, request: RequestState) -> None:
        """Remove a request that has ended."""
        self._policy.learn(request)
        self._remove(request)
        if request.slot >= 0:
            self._give_up(request)
        else:
            self._kv_cache.release(request)

    def find_slot(self, request: RequestState, budget: int) -> bool:
        """Return whether a slot is free.

        For live requests batch ones are preempted, as many at once as `budget` tokens can admit.
        """
        if request.live and not self._slots.free:
            waiting = self.live.waiting
            wanted = sum(before < budget for before in accumulate((other.known for other in waiting), initial=0))
            missing = min(wanted, len(waiting)) - len(self._slots.returning)
            for _ in range(min(missing, len(self.batch.running))):
                self._preempt(self.batch.running[-1])
        return bool(self._slots.free)

    def has_room(self, request: RequestState, prefix: list[int], step: int) -> bool:
        """Return whether a batch request that can begin is admitted; a single one always is."""
        return not self.batch.running or self._policy.has_room(
            request, prefix, step, self.running, self._slots.returning_own_blocks
        )

    def make_room(self, need: int, request: RequestState) -> bool:
        """Preempt requests of the lowest priority until `need` blocks are free.

        For a running request these are all behind it and at last itself; for a waiting live one,
        batch requests alone. Returns False when the blocks are not free now; they may be once a
        launched step is retired.
        """
        waits = request.slot < 0
        if waits:
            in_batch = sum(len(other.blocks) for other in self.batch.running)
            if self._pool.num_free + self._slots.returning_blocks + in_batch < need:
                return False
        while self._pool.num_free < need:
            running = self.batch.running if self.batch.running or waits else self.live.running
            if self._pool.num_free + self._slots.returning_blocks >= need or not running:
                return False
            victim = running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: RequestState) -> None:
        self._class_of(victim).running.pop()
        victim.reached = max(victim.reached, victim.computed)
        self._wait_again(victim)
        self._stats.preemptions += 1

    def _wait_again(self, request: RequestState) -> None:
        self.wait(request)
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
        del queue[bisect_left(queue, request.priority, key=_PRIORITY)]

    def _class_of(self, request: RequestState) -> PriorityClass:
        return self.live if request.live else self.batch
