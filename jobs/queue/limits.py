"""Rate limits per API key, limits of live calls, and weights of tenants.

They are counted in Redis, for all API processes together.
"""

import secrets
from collections.abc import Mapping
from typing import NamedTuple

from jobs.errors import JobsError
from jobs.protocol.requests import mark_of
from jobs.queue import keys
from jobs.queue.base import QueueBase, flat


class Admission(NamedTuple):
    """Whether a request was admitted, and what remains to the key. Times are in seconds."""

    admitted: bool
    left: int
    wait_seconds: float  # until the next request is admitted
    full_seconds: float  # until the key has all requests of a minute again


class TooManyCalls(JobsError):
    """The tenant has reached its limit of live calls, or of their bytes."""

    status = 429
    retry = True


class ModelOverloaded(TooManyCalls):
    """All tenants together have reached the model's limit of live calls."""


class RateLimits(QueueBase):
    """A token bucket per key: it holds the requests of a minute, and refills evenly."""

    def admit(self, key_id: str, per_minute: int) -> Admission:
        """Count a request of the key, unless its bucket is empty."""
        admitted, left, wait, full = self._scripts.call("admit", [key_id, per_minute, secrets.token_hex(6)])
        return Admission(bool(admitted), left, wait / 1000, full / 1000)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the weights of tenants; each other tenant has 1. Raise what redis-py raises."""
        by_tenant = {tenant: f"{weight:g}" for tenant, weight in weights.items() if weight != 1}
        by_mark = {mark_of(tenant): weight for tenant, weight in by_tenant.items()}
        with self.redis.pipeline() as pipeline:
            for name, wanted in ((keys.WEIGHTS, by_tenant), (keys.LIVE_WEIGHTS, by_mark)):
                pipeline.delete(name)
                if wanted:
                    pipeline.hset(name, items=flat(wanted.items()))
            pipeline.execute()
