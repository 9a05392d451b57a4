"""Batches of a server, with asyncio: states, results, tokens, and appending of requests."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from batch_inference_pipeline import frames
from batch_inference_pipeline.batch_state import BatchState, path_of, state_of
from batch_inference_pipeline.errors import BatchFailed, ClientError
from batch_inference_pipeline.event_stream import EventParser, ServerSentEvent
from batch_inference_pipeline.lines import LineOptions, encoded, line_of
from batch_inference_pipeline.official import official_batch
from batch_inference_pipeline.passing import is_passing
from batch_inference_pipeline.results import RequestResult, TokenDelta, TokenDeltas, decode_results
from batch_inference_pipeline.server_calls import decode_answer
from batch_inference_pipeline.server_connection import FIRST_PAUSE, LONGEST_PAUSE, PATIENCE_SECONDS, ServerConnection
from batch_inference_pipeline.vocabulary import CHAT, END_STATES

if TYPE_CHECKING:
    import httpx2
    from openai.types import Batch

_LONGEST_PAGE_PAUSE = 1.0  # a large batch gets new result parts about this often
_SILENCE_SECONDS = 60.0  # a stream sends something at least every 15 s
_PAGE_LINES = 2000


class AsyncBatchHandle:
    """One batch of a server."""

    def __init__(self, connection: ServerConnection, batch_id: str) -> None:
        self.id = batch_id
        self._connection = connection
        self._path = path_of(batch_id)

    async def retrieve(self) -> "Batch":
        """Return the Batch object as it is now."""
        return await official_batch((await self._retrieve()).content)

    async def status(self) -> str:
        """Return the batch's current state."""
        return (await self._state()).status or ""

    async def wait(self, timeout: float | None = None) -> "Batch":
        """Return the Batch object once it has ended. Raise TimeoutError."""
        if timeout is not None:
            await self._connection.until_loaded()
        async with asyncio.timeout(timeout):
            pause = FIRST_PAUSE
            while state_of(answer := await self._retrieve()).status not in END_STATES:
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
            return await official_batch(answer.content)

    async def cancel(self) -> "Batch":
        """Cancel the batch; finished results are kept."""
        answer = await self._connection.patiently(lambda: self._connection.cancel(self.id))
        return await official_batch(answer.content)

    async def results(self) -> AsyncIterator[RequestResult]:
        """Yield every result once: answers as they finish, then failed requests.

        Raise `BatchFailed` if the server refused the lines of the batch.
        """
        async for page in self.pages():
            for result in page:
                yield result

    async def pages(self) -> AsyncGenerator[list[RequestResult], None]:
        """Yield the results in groups.

        The offset of a result line never changes, so no result is repeated or lost when the
        connection is cut.
        """
        offset, pause, began = 0, FIRST_PAUSE, time.monotonic()
        while True:
            batch = await self._state()  # read before the lines: an ended batch has all of them
            more, before = False, offset
            if batch.output_file_id is not None:
                page, offset, more = await self._read(batch.output_file_id, offset)
                if page:
                    yield page
            if batch.status in END_STATES and not more:
                break
            if offset > before:
                pause = _pause_before_end(batch, time.monotonic() - began)
            if offset - before < _PAGE_LINES:
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAGE_PAUSE)
        if batch.status == "failed":
            raise BatchFailed(batch.refusal)
        if batch.error_file_id is not None:
            yield await self._read_errors(batch.error_file_id)

    async def tokens(self) -> AsyncIterator[TokenDelta]:
        """Yield the text of all running requests as it is generated."""
        async with contextlib.aclosing(self.delta_groups()) as groups:
            async for group in groups:
                for delta in group:
                    yield delta

    async def delta_groups(self) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the token deltas in groups."""
        deltas, last_id, received = TokenDeltas(), None, time.monotonic()
        while True:
            try:
                async with contextlib.aclosing(self._events(last_id)) as events:
                    async for event in events:
                        received = time.monotonic()
                        if event is None:
                            continue
                        if event.data == "[DONE]":
                            return
                        value = json.loads(event.data)
                        if "error" in value:
                            break  # the server cannot reach its queue at the moment
                        last_id = event.id or last_id
                        if value.get("object") != "batch":
                            yield deltas.add(value)
            except Exception as error:
                if not is_passing(error):
                    raise
            if time.monotonic() - received > PATIENCE_SECONDS:
                raise ClientError(f"the server has not sent the tokens of {self.id} for {PATIENCE_SECONDS:.0f} s")
            self._connection.check_server()
            await asyncio.sleep(LONGEST_PAUSE)

    async def _events(self, last_id: str | None) -> AsyncGenerator[ServerSentEvent | None, None]:
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        parser = EventParser()
        async with self._connection.calls.stream(
            f"{self._path}/stream", headers=headers, timeout=_SILENCE_SECONDS
        ) as answer:
            async for chunk in answer.aiter_bytes():
                yield None  # a comment also shows that the server is alive
                for event in parser.feed(chunk):
                    yield event

    async def _retrieve(self) -> "httpx2.Response":
        return await self._connection.patiently(lambda: self._connection.calls.get(self._path))

    async def _state(self) -> BatchState:
        return state_of(await self._retrieve())

    async def _read(self, file_id: str, offset: int) -> tuple[list[RequestResult], int, bool]:
        answer = await self._content(file_id, {"offset": offset, "limit": _PAGE_LINES})
        head = answer.headers
        return decode_results(answer.content), int(head["x-last-line"]), head["x-incomplete"] == "true"

    async def _read_errors(self, file_id: str) -> list[RequestResult]:
        return decode_results((await self._content(file_id, {})).content)

    async def _content(self, file_id: str, query: dict[str, int]) -> "httpx2.Response":
        calls = self._connection.calls
        return await self._connection.patiently(lambda: calls.get(f"/files/{quote(file_id)}/content", params=query))


class AsyncOpenBatch(AsyncBatchHandle):
    """A batch to which requests are appended until it is closed."""

    def __init__(self, connection: ServerConnection, batch: BatchState) -> None:
        super().__init__(connection, batch.id)
        self._endpoint = batch.endpoint or CHAT
        self._appended = 0
        self._prefix = secrets.token_hex(4)  # differs from other clients' prefixes

    async def append(self, requests: Iterable[Any], *, model: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Append requests in the forms of `submit`, and return the server's counts of them.

        The server has the requests on disk when the call returns. The client repeats a call whose
        connection was cut, and the server recognizes lines by their `custom_id`. Set a `custom_id`
        on requests that you append again after an error.
        """
        options = await self._connection.line_options(self._endpoint, model, parameters)
        body = await asyncio.to_thread(self._encode, list(frames.requests_of(requests, None)), options)
        if not body:
            raise ValueError("there is no request to append")
        return cast(dict[str, Any], decode_answer(await self._post("requests", body, "application/jsonl")))

    async def close(self) -> "Batch":
        """Close the batch: it ends when all of its requests have ended."""
        return await official_batch((await self._post("close")).content)

    async def _post(self, action: str, *body: Any) -> "httpx2.Response":
        calls = self._connection.calls
        return await self._connection.patiently(lambda: calls.post(f"{self._path}/{action}", *body))

    def _encode(self, requests: list[Any], options: LineOptions) -> bytes:
        lines = []
        for request in requests:
            line = line_of(self._appended, request, options)
            if not (isinstance(request, dict) and request.get("custom_id")):
                line["custom_id"] = f"{self._prefix}-{self._appended}"
            self._appended += 1
            lines.append(encoded(line))
        return b"".join(lines)


def _pause_before_end(batch: BatchState, seconds: float) -> float:
    """Return a pause that shrinks as the batch approaches its end."""
    left = batch.share_left
    return FIRST_PAUSE if left is None else min(max(FIRST_PAUSE, seconds * left / 4), _LONGEST_PAGE_PAUSE)
