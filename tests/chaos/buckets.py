"""What breaks a fleet whose file store is in a bucket: its own processes as elsewhere, and the S3
server.
"""

from collections.abc import Callable

from jobs.store.leases import LEASE_SECONDS
from tests.chaos.bucket_load import BucketLoad
from tests.chaos.killers import KINDS, LONG_OUTAGE, Killers, Kind
from tests.chaos.store_faults import store_faults
from tests.support.bucket_fleet import BucketFleet

_OF_FOLDERS = ("file store", "folder of", "input folders")
"""How the names of the kinds begin that break folders."""
_FIRST = ("S3", "objects", "control plane", "process of", "API", "Redis came", "Redis back by")
"""How those begin that a short run is about."""
_SETTLE_SECONDS = 0.5


class BucketKillers(Killers):
    """Draws from the kinds that break no folder, and those of the S3 server."""

    store_is_broken = False

    @property
    def kinds(self) -> list[Kind]:
        return [*(kind for kind in KINDS if not kind.name.startswith(_OF_FOLDERS)), *OF_BUCKETS]

    @property
    def bucket(self) -> BucketFleet:
        assert isinstance(self.fleet, BucketFleet)
        return self.fleet

    def is_first(self, kind: Kind) -> bool:
        return not self.done[kind.name] and kind.name.startswith(_FIRST)

    def store_faults(self) -> list[str]:
        return store_faults(self.fleet.file_store, self.load.batches)

    def break_server(self, seconds: float, mend: Callable[[], None]) -> str:
        """It is not to be broken in another way until it answers again, after `mend`, some time
        from now.
        """
        self.store_is_broken = True
        self.load.outages += 1

        def begin_again() -> None:
            mend()
            settle()

        def settle() -> None:
            if self.bucket.s3.answers():
                self.load.outages += 1
                self.store_is_broken = False
            else:
                self.later(_SETTLE_SECONDS, settle)

        self.later(seconds, begin_again)
        return f"for {seconds:.1f} s"


def _whole(breaks: Callable[[BucketKillers], str | None]) -> Callable[[Killers], str | None]:
    def when_whole(killers: Killers) -> str | None:
        assert isinstance(killers, BucketKillers)
        return None if killers.store_is_broken else breaks(killers)

    return when_whole


def kill_server(killers: BucketKillers) -> str:
    killers.bucket.s3.kill()
    return killers.break_server(killers.rng.uniform(0.0, 2.0), killers.bucket.s3.start)


def take_server_away(killers: BucketKillers) -> str:
    killers.bucket.s3.kill()
    return killers.break_server(min(LONG_OUTAGE, 3 * killers.every), killers.bucket.s3.start)


def stop_server(killers: BucketKillers) -> str:
    killers.bucket.s3.hang()
    return killers.break_server(killers.rng.uniform(1.3, 2.5) * LEASE_SECONDS, killers.bucket.s3.go_on)


def refuse_calls(killers: BucketKillers) -> str:
    seconds, relay = killers.longer_than_a_lease(), killers.bucket.relay
    relay.is_refusing = True
    killers.later(seconds, lambda: setattr(relay, "is_refusing", False))
    return f"for {seconds:.1f} s"


def lose_replies(killers: BucketKillers) -> str:
    replies = killers.rng.randint(1, 10)
    killers.bucket.relay.lose(replies)
    return f"{replies}"


def cut_replies(killers: BucketKillers) -> str:
    replies = killers.rng.randint(1, 10)
    killers.bucket.relay.cut_short(replies)
    return f"{replies}"


def lose_objects(killers: BucketKillers) -> str | None:
    assert isinstance(killers.load, BucketLoad)
    return killers.load.lose_folder(killers.rng)


OF_BUCKETS = [
    Kind("S3 server killed, back with its files", 2, _whole(kill_server)),
    Kind("S3 server gone for long", 1, _whole(take_server_away)),
    Kind("S3 server stopped for longer than a lease", 2, _whole(stop_server)),
    Kind("S3 server answers 503", 2, _whole(refuse_calls)),
    Kind("S3 server's replies lost", 3, _whole(lose_replies)),
    Kind("S3 server's replies cut short", 3, _whole(cut_replies)),
    Kind("objects of a batch removed", 1, _whole(lose_objects)),
]
