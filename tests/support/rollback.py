"""A Redis that goes back to an earlier moment, as after a failover to a replica that lagged."""

from typing import Any

import redis

_READ_ALL = """
local found = {}
for i, name in ipairs(redis.call('KEYS', '*')) do
    found[i] = {name, redis.call('PTTL', name), redis.call('DUMP', name)}
end
return found
"""


class EarlierRedis:
    """Every key as it was at one moment."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        found: Any = client.eval(_READ_ALL, 0)  # at once, since others may write meanwhile
        self._keys = [(name, max(0, left), value) for name, left, value in found]

    def restore(self) -> None:
        """Go back: what was written since is lost."""
        with self._client.pipeline() as pipeline:
            pipeline.flushall()
            for name, left, value in self._keys:
                pipeline.restore(name, left, value)
            pipeline.execute()
