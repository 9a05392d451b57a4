"""What breaks, how often beside the others, and how it is whole again: the table is `KINDS`."""

import heapq
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from jobs.queue.scripts import persistently
from jobs.store.storage import StoreError
from tests.chaos.load import ChaosLoad
from tests.support.fleet import LocalFleet, Member
from tests.support.processes import descendants, send_all
from tests.support.slow_folders import SlowFolders

CONTROL_PLANE = ("jobs.control.rq_worker", "jobs.control.ticker")
LONG_OUTAGE = 30.0
MOST_SLOW_SECONDS = 12.0
MEND_SECONDS = 10.0  # in which a connection that an earlier failure broke is made anew


@dataclass(frozen=True)
class Kind:
    """One way to break things.

    `breaks` does it, and returns what it did it to; None if it cannot be done just now.
    """

    name: str
    weight: int
    breaks: "Callable[[Killers], str | None]"


class Killers:
    """Draws from a deck that contains each kind as often as it weighs; the first time round once
    each.
    """

    def __init__(self, fleet: LocalFleet, load: ChaosLoad, rng: random.Random, every: float) -> None:
        self.fleet = fleet
        self.load = load
        self.rng = rng
        self.every = every
        self.done: Counter[str] = Counter()
        self.lease = fleet.lease_seconds
        self.now = 0.0
        self.next_segv = 0.0
        self._next = every / 2
        self._deck: list[Kind] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.redis_is_broken = False

    @property
    def kinds(self) -> "list[Kind]":
        """What can be broken."""
        return KINDS

    def is_first(self, kind: Kind) -> bool:
        """Return whether a kind is to be drawn before the others of the deck."""
        return False

    def act(self, now: float) -> None:
        """Mends what is due to be whole again, and breaks the next thing when it is time.

        `now` is seconds since the start.
        """
        self.now = now
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if now < self._next:
            return
        self._next = now + self.every * self.rng.uniform(0.6, 1.4)
        if not self._deck:
            self._deck = [kind for kind in self.kinds for _ in range(kind.weight if self.done else 1)]
            self.rng.shuffle(self._deck)
        self._deck.sort(key=self.is_first)
        for _ in range(len(self.kinds)):
            kind = self._deck.pop()
            try:
                victim = kind.breaks(self)
            except (redis.RedisError, StoreError, ProcessLookupError, StopIteration):
                victim = None
            if victim is not None:
                self.done[kind.name] += 1
                print(f"[{now:5.0f} s] {kind.name}: {victim}", flush=True)
                return
            self._deck.insert(0, kind)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._later, (self.now + seconds, self._count, action))

    def finish(self) -> None:
        """Makes everything whole at once."""
        while self._later:
            heapq.heappop(self._later)[2]()

    def break_redis(self, seconds: float, mend: Callable[[], None]) -> str:
        """Redis is not to be broken in another way until `mend` was called, some time from now."""
        self.redis_is_broken = True

        def whole() -> None:
            mend()
            self.redis_is_broken = False

        self.later(seconds, whole)
        return f"for {seconds:.1f} s"

    def store_faults(self) -> list[str]:
        """Return sentences about what an idle fleet must not leave in a store of these kinds."""
        return []

    def worker(self) -> Member:
        return self.rng.choice(self.fleet.workers)

    def longer_than_a_lease(self) -> float:
        return self.rng.uniform(1.3, 2.5) * self.lease


def kill_worker(killers: Killers) -> str:
    victim = killers.worker()
    victim.send(signal.SIGKILL)
    return victim.name


def kill_all_workers(killers: Killers) -> str:
    for worker in killers.fleet.workers:
        worker.send(signal.SIGKILL)
    return "all"


def kill_core(killers: Killers) -> str:
    return _signal_core(killers, signal.SIGKILL)


def break_core(killers: Killers) -> str | None:
    """Wait between kills: a request with which three cores in a row crash is dead-lettered."""
    if killers.now < killers.next_segv:
        return None
    killers.next_segv = killers.now + 30
    return _signal_core(killers, signal.SIGSEGV)


def kill_grammar_compiler(killers: Killers) -> str | None:
    """The process that compiles grammars, which is there from a worker's first grammar on."""
    running = [(worker.name, pid) for worker in killers.fleet.workers for pid in worker.below("grammars.compiler")]
    if not running:
        return None
    name, pid = killers.rng.choice(running)
    os.kill(pid, signal.SIGKILL)
    return f"of {name}"


def _signal_core(killers: Killers, number: signal.Signals) -> str:
    victim = killers.worker()
    os.kill(next(iter(victim.below("core_process"))), number)
    return victim.name


def stop_worker(killers: Killers) -> str:
    victim, seconds = killers.worker(), killers.longer_than_a_lease()
    pids = [victim.pid, *descendants(victim.pid)] if killers.rng.random() < 0.5 else [victim.pid]
    send_all(pids, signal.SIGSTOP)
    killers.later(seconds, lambda: send_all(pids, signal.SIGCONT))
    return f"{victim.name} for {seconds:.1f} s"


def restart_workers(killers: Killers) -> str:
    for number, worker in enumerate(killers.fleet.workers):
        killers.later(5.0 * number, lambda worker=worker: worker.send(signal.SIGTERM))  # type: ignore[misc]
    return "one after the other"


def kill_control_plane(killers: Killers) -> str:
    killers.fleet.members["jobs"].send(signal.SIGKILL)
    return "all of it"


def kill_control_process(killers: Killers) -> str | None:
    running = [(name, pid) for name in CONTROL_PLANE for pid in killers.fleet.members["jobs"].below(name)]
    if not running:
        return None
    name, pid = killers.rng.choice(running)
    os.kill(pid, signal.SIGKILL)
    return name


def kill_api(killers: Killers) -> str:
    killers.fleet.members["api"].send(signal.SIGKILL)
    return "api"


def kill_redis(killers: Killers) -> str | None:
    return _take_redis_away(killers, killers.rng.uniform(0.0, 2.0))


def take_redis_away(killers: Killers) -> str | None:
    return _take_redis_away(killers, min(LONG_OUTAGE, 3 * killers.every))


def _take_redis_away(killers: Killers, seconds: float) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.fleet.redis.kill()
    return killers.break_redis(seconds, killers.fleet.redis.start)


def empty_redis(killers: Killers) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.load.note_empty()
    killers.fleet.redis.lose_everything()

    def come_back() -> None:
        killers.fleet.redis.start()
        killers.load.note_loss()

    return killers.break_redis(killers.rng.uniform(0.0, 2.0), come_back)


def cut_power(killers: Killers) -> str | None:
    return _go_back(killers, 1.0)


def roll_redis_back(killers: Killers) -> str | None:
    """As a failover to a replica that lags."""
    return _go_back(killers, killers.rng.uniform(2.0, 4.0))


def _go_back(killers: Killers, seconds: float) -> str | None:
    if killers.redis_is_broken:
        return None
    on_disk = killers.fleet.redis.on_disk()

    def lose_what_came_since() -> None:
        killers.load.note_loss()
        killers.fleet.redis.lose_power(on_disk)
        killers.fleet.redis.start()
        killers.load.note_loss()

    return killers.break_redis(seconds, lose_what_came_since)


def stop_redis(killers: Killers) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.fleet.redis.hang()
    return killers.break_redis(killers.longer_than_a_lease(), killers.fleet.redis.go_on)


def fill_disk(killers: Killers) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.fleet.redis.fill_disk()
    return killers.break_redis(killers.longer_than_a_lease(), killers.fleet.redis.free_disk)


def demote_redis(killers: Killers) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.fleet.client.replicaof("127.0.0.1", 1)
    return killers.break_redis(killers.longer_than_a_lease(), lambda: _promote(killers))


def _promote(killers: Killers) -> None:
    persistently(lambda: killers.fleet.client.replicaof("NO", "ONE"), MEND_SECONDS)


def fill_memory(killers: Killers) -> str | None:
    if killers.redis_is_broken:
        return None
    killers.fleet.client.config_set("maxmemory", 1)
    return killers.break_redis(killers.longer_than_a_lease(), lambda: _free_memory(killers))


def _free_memory(killers: Killers) -> None:
    persistently(lambda: killers.fleet.client.config_set("maxmemory", 0), MEND_SECONDS)


def lose_replies(killers: Killers) -> str:
    number, replies = killers.rng.randrange(len(killers.fleet.proxies)), killers.rng.randint(1, 10)
    killers.fleet.proxies[number].lose(replies)
    return f"{replies} to worker-{number}"


def swallow_reply(killers: Killers) -> str:
    number = killers.rng.randrange(len(killers.fleet.proxies))
    killers.fleet.proxies[number].swallow(1)
    return f"to worker-{number}"


def cut_off(killers: Killers) -> str:
    number, seconds = killers.rng.randrange(len(killers.fleet.proxies)), killers.longer_than_a_lease()
    proxy = killers.fleet.proxies[number]
    proxy.part()
    killers.later(seconds, proxy.join)
    return f"worker-{number} for {seconds:.1f} s"


def unmount_store(killers: Killers) -> str | None:
    if not killers.load.take_store_away():
        return None
    seconds = killers.longer_than_a_lease()
    killers.later(seconds, killers.load.bring_store_back)
    return f"for {seconds:.1f} s"


def lose_folder(killers: Killers) -> str | None:
    return killers.load.lose_folder(killers.rng)


def slow_inputs(killers: Killers) -> str:
    seconds = killers.rng.choice([0.02, 0.2, 1.0])
    return _disturb_inputs(killers, f"{seconds} s a call", lambda folders, one: folders.slow(one, seconds))


def block_inputs(killers: Killers) -> str:
    return _disturb_inputs(killers, "no answer", SlowFolders.block)


def _disturb_inputs(killers: Killers, what: str, disturb: Callable[[SlowFolders, Path], None]) -> str:
    """Some of the folders that batches under way, and the next one, are read from."""
    found, seconds = killers.load.input_folders, killers.rng.uniform(1.0, MOST_SLOW_SECONDS)
    chosen = killers.rng.sample(found, killers.rng.randint(1, len(found)))
    for folder in chosen:
        disturb(killers.fleet.slow_folders, folder)
    killers.later(seconds, lambda: killers.fleet.slow_folders.release(*chosen))
    return f"{what} for {seconds:.1f} s in {', '.join(folder.name for folder in chosen)}"


def set_clock(killers: Killers) -> str:
    clocks = {"redis": killers.fleet.redis.clock, **killers.fleet.clocks}
    name, seconds = killers.rng.choice(sorted(clocks)), killers.rng.choice([-60.0, 60.0])
    clocks[name].step(seconds)
    return f"{name} by {seconds:+.0f} s"


KINDS = [
    Kind("worker killed", 4, kill_worker),
    Kind("all workers killed", 1, kill_all_workers),
    Kind("engine core killed", 3, kill_core),
    Kind("engine core SIGSEGV", 2, break_core),
    Kind("grammar compiler killed", 2, kill_grammar_compiler),
    Kind("worker stopped for longer than its lease", 2, stop_worker),
    Kind("workers restarted by SIGTERM", 1, restart_workers),
    Kind("control plane killed", 1, kill_control_plane),
    Kind("process of the control plane killed", 2, kill_control_process),
    Kind("API killed", 1, kill_api),
    Kind("Redis killed, back with its file", 3, kill_redis),
    Kind("Redis gone for long", 1, take_redis_away),
    Kind("Redis came back empty", 1, empty_redis),
    Kind("Redis lost the last second of its file", 1, cut_power),
    Kind("Redis back by some seconds", 2, roll_redis_back),
    Kind("Redis stopped for longer than a lease", 1, stop_redis),
    Kind("disk full", 1, fill_disk),
    Kind("Redis read-only", 1, demote_redis),
    Kind("memory full", 1, fill_memory),
    Kind("replies lost on the way to a worker", 2, lose_replies),
    Kind("reply swallowed on the way to a worker", 1, swallow_reply),
    Kind("worker cut off for longer than its lease", 2, cut_off),
    Kind("clock set by a minute", 2, set_clock),
    Kind("file store not mounted", 2, unmount_store),
    Kind("folder of a batch removed", 1, lose_folder),
    Kind("input folders slow", 2, slow_inputs),
    Kind("input folders blocked", 2, block_inputs),
]
