"""Models that a server loads when requests for them wait, and the amount of waiting work."""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.requests import pack
from jobs.queue import keys
from jobs.queue.base import QueueBase, text

OFFER_SECONDS = 30
"""How long a server's offer lasts unless it is renewed."""


class OnDemandModel(msgspec.Struct, frozen=True):
    """A server's offer to load a model when requests for it wait.

    While there is a `refusal`, calls for the model would wait in vain.
    """

    server: str  # the id under which the server waits for work, like a worker
    problem: str = ""  # why it cannot load the model now: the end of "The model ..."
    failure: str = ""  # how the last attempt to load it failed, if it did; for operators only
    refusal: Literal["", "memory", "failed"] = ""
    until: float = 0.0  # unix seconds by the clock of Redis
    defaults: DefaultParameters | None = None  # None while unknown
    alias: bool = False  # the name is another one of a model on offer; lists leave it out


_decode = msgspec.msgpack.Decoder(OnDemandModel).decode


class OnDemand(QueueBase):
    """Part of `jobs.queue.request_queue.Queue`."""

    def offer(self, models: Mapping[str, OnDemandModel], waits_for: Collection[str]) -> None:
        """Offer for a while to load these models when requests for them wait.

        The server is woken by the next request for a model of `waits_for`, and when the last worker
        of such a model ends, unless another worker serves the model.
        """
        until = self.now() + OFFER_SECONDS
        offers = [part for name, one in models.items() for part in (_field(name, one), pack(_until(one, until)))]
        waits = [
            ["SADD" if name in waits_for else "SREM", keys.loaders(name), one.server] for name, one in models.items()
        ]
        lasts = [["EXPIRE", name, OFFER_SECONDS] for name in (keys.ON_DEMAND, *map(keys.loaders, waits_for))]
        self.commands([["HSET", keys.ON_DEMAND, *offers], *waits, *lasts])

    def withdraw(self, models: Mapping[str, OnDemandModel]) -> None:
        """Withdraw the offers."""
        waits = [["SREM", keys.loaders(name), one.server] for name, one in models.items()]
        streams = [["UNLINK", keys.control(server)] for server in {one.server for one in models.values()}]
        offers = [_field(name, one) for name, one in models.items()]
        self.commands([["HDEL", keys.ON_DEMAND, *offers], *waits, *streams])

    def on_demand(self) -> dict[str, OnDemandModel]:
        """Return the models on offer by name; of several servers' offers, the best one."""
        (seconds, micros), packed = self.commands([["TIME"], ["HGETALL", keys.ON_DEMAND]])
        now = int(seconds) + int(micros) / 1e6
        found = ((text(name), _decode(value)) for name, value in packed.items())
        offers = [(name.partition(" ")[2], offer) for name, offer in found if offer.until > now]
        # dict() keeps the last of each name.
        return dict(sorted(offers, key=lambda one: (one[0], not one[1].refusal, not one[1].problem, one[1].server)))

    def waiting_work(self, models: Collection[str]) -> dict[str, tuple[int, int]]:
        """Return for each model how many live calls and how much batch work wait for a worker.

        The second number counts batches' ready lines and quarantined requests. Each is above 0 if a
        claim would return such a request.
        """
        kinds = ["LLEN", keys.live], ["ZCARD", keys.live_tenants], ["ZCARD", keys.tenants], ["ZCARD", keys.quarantined]
        counts = self.commands([command, key(model)] for model in models for command, key in kinds)  # type: ignore[operator]
        rows = (counts[at : at + len(kinds)] for at in range(0, len(counts), len(kinds)))
        return {
            model: (first + in_turns, lines + quarantined)
            for model, (first, in_turns, lines, quarantined) in zip(models, rows, strict=True)
        }

    def held_by(self, workers: Collection[str]) -> dict[str, int]:
        """Return how many requests each of the workers holds."""
        return dict(zip(workers, self.commands(["SCARD", keys.held(worker)] for worker in workers), strict=True))


def _field(model: str, offer: OnDemandModel) -> str:
    return f"{offer.server} {model}"


def _until(offer: OnDemandModel, until: float) -> OnDemandModel:
    return msgspec.structs.replace(offer, until=until)
