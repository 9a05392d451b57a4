"""One reader task per API process: it hands workers' entries to the waiting live calls."""

import asyncio
import contextlib
import logging
import uuid
from typing import Any

import redis
import redis.asyncio

from api.inbox import Inbox
from jobs.protocol.requests import RequestKey
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import API_ALIVE_SECONDS, FIRST_ID, parse_api_entry

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_TIDY_SECONDS = 1.0
_MOST_ENTRIES = 1000

logger = logging.getLogger(__name__)


class Reader:
    """Read the stream of this API process and hand each entry to its call.

    From time to time it trims the stream in Redis and reports that the process is alive; without
    that its calls end after a minute.
    """

    def __init__(self, client: "redis.asyncio.Redis", queue: Queue, short_retry_queue: Queue) -> None:
        """`short_retry_queue` is for calls that would keep the reader from reading."""
        self.api_id = f"api-{uuid.uuid4().hex[:12]}"
        self._client = client
        self._connection: Any = None  # of the client, from the first call on
        self._queue = queue
        self._short_retry_queue = short_retry_queue
        self._inboxes: dict[str, Inbox] = {}  # by the name of the call
        self._unneeded: list[RequestKey] = []  # ended calls whose streams no client can ask for
        self._uncancelled: list[RequestKey] = []  # calls whose clients left while Redis was away
        self._wanted = asyncio.Event()
        self._next_tidy = 0.0  # on the loop's clock

    @property
    def calls(self) -> int:
        """Return the number of waiting calls."""
        return len(self._inboxes)

    def open(self, key: RequestKey) -> Inbox:
        """Open the inbox of a call before it is submitted."""
        inbox = self._inboxes[str(key)] = Inbox(key, self._queue)
        self._wanted.set()
        return inbox

    def close(self, key: RequestKey, unneeded: bool = False) -> None:
        """Drop the inbox; later entries of the call are ignored.

        `unneeded`: the call has ended, and no client can come back for its stream.
        """
        inbox = self._inboxes.pop(str(key), None)
        if inbox is not None:
            inbox.close()
        if unneeded:
            self._unneeded.append(key)
        self._rest()

    def cancel_later(self, key: RequestKey) -> None:
        """Cancel a call once Redis is back."""
        self._uncancelled.append(key)
        self._wanted.set()

    async def run(self) -> None:
        """Read until cancelled.

        While Redis is unavailable it retries. Calls fail when that takes longer than the queue's
        timeout (`redis_retry_seconds`).
        """
        last_id, pause, away_since = FIRST_ID, _FIRST_PAUSE, 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wanted.wait()
                try:
                    last_id = await self._read(last_id)
                    pause, away_since = _FIRST_PAUSE, 0.0
                    if loop.time() >= self._next_tidy:
                        self._next_tidy = loop.time() + _TIDY_SECONDS
                        await self._tidy(last_id)
                except (redis.RedisError, OSError, QueueUnavailable) as error:
                    away_since = away_since or loop.time()
                    if loop.time() - away_since > self._queue.settings.redis_retry_seconds:
                        self._fail_all(error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._client.delete(keys.api(self.api_id))

    async def _read(self, last_id: str) -> str:
        """Hand on the entries after `last_id`; return the id of the last one."""
        filled: dict[str, Inbox] = {}
        for entry_id, fields in await self._entries_after(last_id):
            last_id = entry_id.decode()
            for item in parse_api_entry(dict(zip(fields[::2], fields[1::2], strict=True))):
                inbox = self._inboxes.get(item.name)
                if inbox is None:
                    continue
                entry = item.entry(inbox.key)
                if entry is None:
                    inbox.read_up_to(item.entry_id)
                else:
                    inbox.put(entry)
                    filled[item.name] = inbox
        # All entries first: each write wakes a client, which takes the processor and its caches
        outgoing = [(inbox.outlet, inbox.deliver()) for inbox in filled.values()]
        for outlet, shown in outgoing:
            if outlet is not None and shown:
                outlet.write(shown)
        return last_id

    async def _entries_after(self, last_id: str) -> list[Any]:
        """Return ids and fields, read over a connection of its own.

        Taking one from the client's pool lasts longer than the server's answer.
        """
        if self._connection is None:
            pool: Any = self._client.connection_pool
            self._connection = await pool.get_connection()
        if not self._connection.is_connected:
            # A plain send would use the old address; this asks the Sentinels, if there are any
            await self._connection.connect()
        await self._connection.send_command(
            "XREAD",
            "COUNT",
            _MOST_ENTRIES,
            "BLOCK",
            int(_TIDY_SECONDS * 1000),
            "STREAMS",
            keys.api(self.api_id),
            last_id,
        )
        answer = await self._connection.read_response()
        return [] if answer is None else answer[0][1]

    async def _tidy(self, last_id: str) -> None:
        unneeded, uncancelled = list(self._unneeded), list(self._uncancelled)
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.expire(keys.api_alive(self.api_id), API_ALIVE_SECONDS)  # also if memory is full
            pipeline.set(keys.api_alive(self.api_id), 1, ex=API_ALIVE_SECONDS, nx=True)
            pipeline.xtrim(keys.api(self.api_id), minid=last_id, approximate=False)
            await pipeline.execute(raise_on_error=False)
        if unneeded:
            await asyncio.to_thread(self._short_retry_queue.forget_streams, unneeded)
        if uncancelled:
            await asyncio.to_thread(self._short_retry_queue.cancel, uncancelled)
        del self._unneeded[: len(unneeded)], self._uncancelled[: len(uncancelled)]
        self._rest()

    def _rest(self) -> None:
        if not (self._inboxes or self._unneeded or self._uncancelled):
            self._wanted.clear()

    def _fail_all(self, error: Exception) -> None:
        logger.warning("Redis unavailable for too long; failing %d calls: %s", self.calls, error)
        for inbox in list(self._inboxes.values()):
            inbox.fail(QueueUnavailable(str(error)))
