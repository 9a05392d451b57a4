"""`GET /v1/batches/{id}/stream`: the tokens of all requests of a batch, as server-sent events.

The batch's own stream in Redis holds the entries of all its requests while a client reads. A reader
that lost its connection continues exactly where it was, on any API process, while its last event is
still stored. Otherwise, and at first, it gets the text of running requests so far; the offsets tell
the new part. A slow reader falls behind and delays nothing. Tokens from the time of validation are
shown once the batch is in progress.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from api.auth import caller_of
from api.batch_objects import batch_object, find_batch
from api.http.event_stream import EventStream, event
from api.http.openapi import EVENTS
from api.state import ApiState, queue_reachable, state_of
from api.threads import LIVE, run_in
from api.token_events import LAST_EVENT_ID, last_event_id, next_entries, patiently, to_the_end
from jobs.batch.client import BatchRecord
from jobs.batch.line_index import LineIndex
from jobs.batch.manifest import load_manifest
from jobs.batch.source import open_lines
from jobs.protocol.requests import BatchEntry, RequestKey
from jobs.queue import keys
from jobs.queue.following import StreamSnapshot, Watch
from jobs.queue.streams import FIRST_ID
from jobs.store.storage import StoreError

router = APIRouter(dependencies=[Depends(queue_reachable)])

_SILENCE_SECONDS = 1.0


@router.get(
    "/v1/batches/{batch_id}/stream",
    responses={200: {"content": EVENTS}},
    response_class=Response,
    openapi_extra={"parameters": [LAST_EVENT_ID]},
)
async def stream(request: Request, batch_id: str) -> Response:
    """Stream the tokens of a batch's requests as they come.

    Events are `{"custom_id", "line", "choices": [{"index", "token_offset", "text", "text_offset"}],
    "status"}`; `status` is null until the request's last event, where it is `completed` or
    `failed`. At the batch's end comes the Batch object, then `[DONE]`.
    """
    state = state_of(request)
    after = last_event_id(request)
    finding = run_in_threadpool(find_batch, state, caller_of(request).tenant, batch_id)
    follower = Follower(state, await state.fleet.unless_away(finding))
    await state.fleet.unless_away(follower.begin())
    return EventStream(to_the_end(follower.events(after), state.followers), state.settings.ping_seconds, follower.close)


class Follower:
    """One reader of one batch."""

    def __init__(self, state: ApiState, record: BatchRecord) -> None:
        self._state = state
        self._record = record
        self._batch = record.id
        self._watch = Watch(state.fleet.short_retry_queue, record.id, state.settings.watch_seconds)
        self._first_id: str | None = None  # the batch's last entry when the reader began
        self._custom_ids: dict[RequestKey, str] = {}  # of running requests
        self._lines: LineIndex | None = None

    async def begin(self) -> None:
        """Start to watch before the response's headers are sent, so that no event is missed.

        Raise `QueueUnavailable`, or `ApiError` if the batch is gone.
        """
        if not self._record.ended:
            self._first_id = await self._watched()
            if not self._record.shows_lines:
                await self._look()  # the plan may be older than the watch, which reports later changes only

    async def _watched(self) -> str:
        return await patiently(self._state, lambda: run_in(LIVE, self._watch.begin))

    async def events(self, after: str | None) -> AsyncIterator[bytes]:
        """Yield events until the batch has ended and all of its entries are shown.

        Raises `QueueUnavailable`.
        """
        after = await self._planned(after)
        first_id = self._first_id
        while True:
            if not self._record.ended and self._watch.due:
                await self._watched()
            entries = None if after is None else await run_in(LIVE, self._state.queue.read_batch, self._batch, after)
            if entries:
                for value, entry_id in await self._values(entries):
                    yield event(value, entry_id)
                after = entries[-1].id
                if any(entry.key is None for entry in entries):
                    await self._look()
            elif self._record.ended:
                break
            elif entries is None or after is None:
                snapshot = StreamSnapshot(self._state.queue, self._batch, first_id or await self._watched())
                async for one in self._from(snapshot):
                    yield one
                after = snapshot.last_id
            elif not await next_entries(self._state, keys.batch_tokens(self._batch), after, 1, _SILENCE_SECONDS):
                await self._look()
            first_id = None  # too old for another snapshot
        yield event(batch_object(self._record))

    async def _planned(self, after: str | None) -> str | None:
        """Wait while the batch is validated; entries of early lines are shown afterwards.

        Return `after`, or None if it ended without a plan: then none of its lines is shown.
        """
        seen = self._first_id or FIRST_ID
        while not (self._record.shows_lines or self._record.ended):
            if self._watch.due:
                await self._watched()
                await self._look()  # the watch may have lapsed, and missed a change of the state
                continue
            entries = await next_entries(self._state, keys.batch_tokens(self._batch), seen, 1000, _SILENCE_SECONDS)
            if entries:
                seen = entries[-1][0]
            if not entries or any(not fields[b"k"] for _, fields in entries):  # the state changed
                await self._look()
        return after if self._record.shows_lines else None

    async def close(self) -> None:
        """Close the index of the file's lines."""
        if self._lines is not None:
            self._lines.close()

    async def _from(self, snapshot: StreamSnapshot) -> AsyncIterator[bytes]:
        """Yield events with the text of running requests so far.

        Only the last has an id, so that a client that is cut before it begins again.
        """
        last: dict[str, Any] | None = None
        groups = iter(snapshot)
        while (entries := await run_in(LIVE, next, groups, None)) is not None:
            for value, _ in await self._values(entries):
                if last is not None:
                    yield event(last)
                last = value
        if last is not None:
            yield event(last, snapshot.last_id)

    async def _values(self, entries: Sequence[BatchEntry]) -> list[tuple[dict[str, Any], str]]:
        """Return the events for clients, each with its id."""
        visible = [
            (entry.key, entry)
            for entry in entries
            if entry.key is not None and (entry.chunks or entry.succeeded is not None)
        ]
        unnamed = {key for key, _ in visible} - self._custom_ids.keys()
        if unnamed:
            self._custom_ids |= await run_in_threadpool(self._find_custom_ids, sorted(unnamed))
        values = [(entry.event(key, self._custom_ids.get(key)), entry.id) for key, entry in visible]
        for key, entry in visible:
            if entry.succeeded is not None:
                self._custom_ids.pop(key, None)
        return values

    def _find_custom_ids(self, requests: Sequence[RequestKey]) -> dict[RequestKey, str]:
        """Return the custom_ids, or none if the file of an ended batch was removed."""
        for _ in range(2):  # the lines may have moved when their file was closed
            with contextlib.suppress(StoreError):
                if self._lines is None:
                    manifest = load_manifest(self._record.spec.root)
                    self._lines = None if manifest is None else open_lines(manifest)
                if self._lines is not None:
                    return {key: self._lines.custom_id(key.line) for key in requests}
            if self._lines is not None:
                self._lines.close()
            self._lines = None
        return {}

    async def _look(self) -> None:
        """Read the record anew.

        An empty Redis gets it back from the file store within some seconds. Raises `ApiError` if it
        is gone.
        """
        tenant = self._record.spec.tenant
        self._record = await patiently(
            self._state, lambda: run_in_threadpool(find_batch, self._state, tenant, self._batch)
        )
