"""A Redis that goes back to an earlier moment, as after a failover to a replica that lagged."""

from typing import Any

import redis


class EarlierRedis:
    """Every key as it was at one moment."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        names: Any = sorted(client.keys())
        with client.pipeline() as pipeline:
            for name in names:
                pipeline.dump(name)
                pipeline.pttl(name)
            answers = pipeline.execute()
        self._keys = [
            (name, max(0, left), value)
            for name, value, left in zip(names, answers[::2], answers[1::2], strict=True)
            if value is not None
        ]

    def restore(self) -> None:
        """Go back: what was written since is lost."""
        with self._client.pipeline() as pipeline:
            pipeline.flushall()
            for name, left, value in self._keys:
                pipeline.restore(name, left, value)
            pipeline.execute()
