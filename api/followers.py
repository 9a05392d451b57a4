"""Which clients follow streams, for the connections to Redis that they take."""

import contextlib
from collections.abc import AsyncIterator

import redis.asyncio


class Followers:
    """Each takes a connection to Redis while it waits, which is closed when the last has left."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._count = 0

    @contextlib.asynccontextmanager
    async def one_more(self) -> AsyncIterator[None]:
        """Count a client for as long as it follows."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                await self._client.connection_pool.disconnect(inuse_connections=False)
