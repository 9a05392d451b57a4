"""Parts of every event stream of tokens: reports of its reader, patience with Redis, the end."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import redis
from fastapi import Request

from api.followers import Followers
from api.http.errors import answer_to
from api.http.event_stream import event
from api.state import ApiState
from jobs.protocol import fields
from jobs.protocol.results import ApiError
from jobs.queue.connection import MAX_BLOCK_SECONDS
from jobs.queue.scripts import QueueUnavailable, passing_reason
from jobs.store.storage import StoreError

T = TypeVar("T")

LAST_EVENT_ID: dict[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "the id of the last event that was seen; the stream goes on behind it",
    "schema": {"type": "string"},
}
"""One of the `parameters` of a route whose stream can be resumed."""

_EVENT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")  # the ids that Redis takes
_PAUSE_SECONDS = 0.1


def last_event_id(request: Request) -> str | None:
    """Return the id after which a reader goes on, None for a new one. Raises `ApiError`."""
    given = request.headers.get("last-event-id")
    if given and not _EVENT_ID.fullmatch(given):
        raise ApiError(
            400,
            f"Last-Event-ID is not the id of an event: {fields.shown(given)}",
            param="Last-Event-ID",
            code="invalid_value",
        )
    return given or None


async def to_the_end(events: AsyncIterator[bytes], followers: Followers) -> AsyncIterator[bytes]:
    """Yield the events, then the end mark, after an error if they cannot go on.

    They cannot if Redis stays away for too long, the file store is away, or the batch or request is
    gone.
    """
    try:
        async with followers.following():
            async for one in events:
                yield one
    except ApiError as error:
        yield event(error.body())
    except (QueueUnavailable, StoreError, redis.RedisError) as error:
        yield event(answer_to(error).body())
    yield event(None)


async def next_entries(
    state: ApiState, name: str, last_id: str, count: int, seconds: float = MAX_BLOCK_SECONDS
) -> list[tuple[str, dict[bytes, bytes]]]:
    """Return the entries of a stream after `last_id`, empty if none comes in time."""
    answer: Any = await patiently(
        state, lambda: state.stream_client.xread({name: last_id}, count=count, block=int(seconds * 1000))
    )
    return [(entry_id.decode(), fields) for _, entries in answer for entry_id, fields in entries]


async def patiently(state: ApiState, ask: Callable[[], Awaitable[T]], at_once: tuple[type[Exception], ...] = ()) -> T:
    """Return the answer of Redis, asked again for `redis_retry_seconds` while it is away.

    No thread waits meanwhile. Errors `at_once` are raised without another try.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + state.queue.settings.redis_retry_seconds
    while True:
        try:
            return await ask()
        except at_once:
            raise
        except (redis.RedisError, QueueUnavailable) as error:
            passing = isinstance(error, QueueUnavailable) or passing_reason(error) is not None
            if not passing or loop.time() > deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
