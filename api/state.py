"""The state that the routes of one API process share."""

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import redis.asyncio
from fastapi import Request, Response
from fastapi.routing import APIRoute

from api.fleet import Fleet
from api.followers import Followers
from api.reader import Reader
from api.settings import ApiSettings
from api.shares import ClientShares
from jobs.protocol.requests import RequestKey, is_live_id_of
from jobs.queue import keys
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.following import traces
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import KeyRing
from jobs.store.file_store import FileStore
from jobs.store.idempotency import IdempotencyKeys
from jobs.store.upload_store import UploadStore


@dataclass(frozen=True)
class ApiState:
    """The shared objects, made when the app starts and closed when it ends."""

    settings: ApiSettings
    queue: Queue
    stream_client: redis.asyncio.Redis
    reader: Reader
    fleet: Fleet
    files: FileStore
    keys: KeyRing

    @cached_property
    def followers(self) -> Followers:
        """Return the clients that read with `stream_client`."""
        return Followers(self.stream_client)

    @cached_property
    def bodies(self) -> ClientShares:
        """Return the memory for bodies on their way."""
        most = max(self.settings.body_memory_bytes, 2 * self.settings.max_body_bytes)
        return ClientShares(most, most // 2)

    @cached_property
    def calls(self) -> ClientShares:
        """Return the calls of keys; each may have half as many as there are connections."""
        most = self.settings.max_connections
        return ClientShares(most, max(1, most // 2))

    @cached_property
    def uploads(self) -> UploadStore:
        """Return the uploads in parts."""
        return UploadStore(self.queue, self.files)

    @cached_property
    def idempotency_keys(self) -> IdempotencyKeys:
        """Return the keys by which clients repeat a create."""
        return IdempotencyKeys(self.queue, self.files)

    async def knows(self, key: RequestKey) -> bool:
        """Return whether the request waits, runs, or left a stream."""
        execute: Any = self.stream_client.execute_command
        for command in traces(key):
            if await execute(*command):
                return True
        return False

    async def is_of(self, tenant: str, key: RequestKey) -> bool:
        """Return whether the request may be shown to this tenant."""
        if key.live:
            return is_live_id_of(tenant, key.batch)
        names = ("tenant", "open", "total")
        values: Any = await self.stream_client.hmget(keys.batch(key.batch), *names)
        record = BatchStatus.read(names, values)
        return record.tenant == tenant and record.shows_lines


def state_of(request: Request) -> ApiState:
    """Return the state of the app that got the request."""
    return cast(ApiState, request.app.state.pipeline)


async def queue_reachable(request: Request) -> None:
    """Wait until Redis answers; a dependency of routes that ask the queue in a thread.

    While Redis is away they wait here without a thread, and are refused together. Raises
    `QueueUnavailable`.
    """
    await state_of(request).fleet.snapshot()


class BlockingRoute(APIRoute):
    """Refuse the call of a plain function when Redis goes away, even while it is in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that stops waiting for the function when Redis goes away."""
        handle = super().get_route_handler()
        if inspect.iscoroutinefunction(self.endpoint):
            return handle

        async def unless_away(request: Request) -> Response:
            return await state_of(request).fleet.unless_away(handle(request))

        return unless_away
