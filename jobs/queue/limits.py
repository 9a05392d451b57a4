"""How many requests a key may send in a minute, and how many live calls there may be at once,
counted in Redis for all API processes together; and the weights of tenants.
"""

import secrets
from collections.abc import Mapping
from typing import NamedTuple

from jobs.errors import JobsError
from jobs.protocol.requests import mark_of
from jobs.queue import keys
from jobs.queue.base import QueueBase, flat


class Admission(NamedTuple):
    """Whether a request was let in, and what the key has left. Seconds."""

    admitted: bool
    left: int
    wait_seconds: float  # until the next one is let in
    full_seconds: float  # until all of a minute's requests are there again


class TooManyCalls(JobsError):
    """The tenant's live calls are as many, or as large, as they may be at once."""

    status = 429
    retry = True


class ModelOverloaded(TooManyCalls):
    """Those of all tenants for the model are."""


class RateLimits(QueueBase):
    """A bucket for each key: it holds the requests of a minute, and fills evenly."""

    def admit(self, key_id: str, per_minute: int) -> Admission:
        """Counts a request of the key unless its bucket is empty."""
        admitted, left, wait, full = self._scripts.call("admit", [key_id, per_minute, secrets.token_hex(6)])
        return Admission(bool(admitted), left, wait / 1000, full / 1000)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Make these the weights of tenants; each other tenant has 1. Raise what Redis raises."""
        by_tenant = {tenant: f"{weight:g}" for tenant, weight in weights.items() if weight != 1}
        by_mark = {mark_of(tenant): weight for tenant, weight in by_tenant.items()}
        with self.redis.pipeline() as pipeline:
            for name, wanted in ((keys.WEIGHTS, by_tenant), (keys.LIVE_WEIGHTS, by_mark)):
                pipeline.delete(name)
                if wanted:
                    pipeline.hset(name, items=flat(wanted.items()))
            pipeline.execute()
