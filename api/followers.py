"""Clients that follow streams, and the connections to Redis that they use."""

import contextlib
from collections.abc import AsyncIterator

import redis.asyncio


class Followers:
    """A count of clients that follow streams, each with a connection to Redis while it waits.

    Idle connections are closed when the last client leaves.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._count = 0

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Count one more client within the context."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                await self._client.connection_pool.disconnect(inuse_connections=False)
