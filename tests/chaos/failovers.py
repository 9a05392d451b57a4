"""What breaks a fleet behind Sentinels: its own processes as elsewhere, and the master."""

import os
import signal
import time
from collections.abc import Callable

from tests.chaos.killers import KINDS, Killers, Kind
from tests.support.sentinel_fleet import SentinelFleet
from tests.support.sentinels import FAILOVER_SECONDS, SentinelSet, ServerProcess

_NEEDS_ONE_SERVER = ("Redis", "memory", "disk", "repl", "clock", "worker cut off")
"""How the names of the kinds begin that break the one server, or the proxies before it."""


class SentinelKillers(Killers):
    """Draws from the kinds that need no single server, and the failovers."""

    @property
    def kinds(self) -> list[Kind]:
        return [*(kind for kind in KINDS if not kind.name.startswith(_NEEDS_ONE_SERVER)), *FAILOVERS]

    @property
    def sentinels(self) -> SentinelSet:
        assert isinstance(self.fleet, SentinelFleet)
        return self.fleet.sentinels

    def lose_master(self, take: Callable[[ServerProcess], None], bring_back: Callable[[ServerProcess], None]) -> str:
        """Take the master away until another is there; it comes back some time later as a replica,
        and may answer as a master at first.
        """
        before = self.sentinels.master
        return self._failing_over(before, lambda: take(before), lambda: bring_back(before))

    def fail_over_by_order(self) -> str:
        order = self.sentinels.order_failover
        return self._failing_over(self.sentinels.master, order, lambda: None, order)

    def _failing_over(
        self,
        before: ServerProcess,
        begin: Callable[[], object],
        mend: Callable[[], None],
        again: Callable[[], object] = lambda: None,
    ) -> str:
        """What the new master lacks is lost, from before `begin` until the old one is a replica.

        `again` repeats an order, which Sentinels may give up after the machine stood still.
        """
        self.load.note_loss()
        self.redis_is_broken = True
        begin()
        ordered_at = time.monotonic()

        def look() -> None:
            nonlocal ordered_at
            if self.sentinels.master is before:
                if time.monotonic() - ordered_at > FAILOVER_SECONDS:
                    ordered_at = time.monotonic()
                    again()
                self.later(0.2, look)
            else:
                self.later(self.longer_than_a_lease(), come_back)

        def come_back() -> None:
            mend()
            self.later(0.5, settle)

        def settle() -> None:
            if self.sentinels.is_whole():
                self.load.note_loss()
                self.redis_is_broken = False
            else:
                self.later(0.5, settle)

        self.later(0.2, look)
        return f"on port {before.port}"


def _whole(breaks: Callable[[SentinelKillers], str]) -> Callable[[Killers], str | None]:
    """Another failover needs a replica that is up to date."""

    def when_whole(killers: Killers) -> str | None:
        assert isinstance(killers, SentinelKillers)
        return None if killers.redis_is_broken or not killers.sentinels.is_whole() else breaks(killers)

    return when_whole


def kill_master(killers: SentinelKillers) -> str:
    return killers.lose_master(ServerProcess.kill, ServerProcess.start)


def stop_master(killers: SentinelKillers) -> str:
    """When it goes on it acts as a master, and answers what was sent to it meanwhile."""
    return killers.lose_master(
        lambda server: os.kill(server.pid, signal.SIGSTOP), lambda server: os.kill(server.pid, signal.SIGCONT)
    )


FAILOVERS = [
    Kind("failover, master killed", 3, _whole(kill_master)),
    Kind("failover, master stopped", 2, _whole(stop_master)),
    Kind("failover by order", 2, _whole(SentinelKillers.fail_over_by_order)),
]
