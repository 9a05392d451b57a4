"""The batches of one `map`."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from itertools import takewhile
from typing import TypeVar

from batch_inference_pipeline.batch_handle import AsyncBatchHandle
from batch_inference_pipeline.errors import ClientError
from batch_inference_pipeline.lines import SpooledLines
from batch_inference_pipeline.results import InputOrder, RequestFailed, RequestResult
from batch_inference_pipeline.server_connection import ServerConnection
from batch_inference_pipeline.submission import submit_lines

T = TypeVar("T")

MAP_LINES = 50_000  # lines of one batch; the server's default limit
_KEPT = {"anchor": "created_at", "seconds": 86_400}  # for uploaded files and for results


class MapRun:
    """The batches of one `map`; at most two are submitted at a time."""

    def __init__(
        self, connection: ServerConnection, chunks: list[SpooledLines], ordered: bool, deadline: float | None
    ) -> None:
        self._connection = connection
        self._chunks = deque(chunks)
        self._ordered = ordered
        self._deadline = deadline
        self._submitted: deque[tuple[AsyncBatchHandle, list[str]]] = deque()
        connection.at_close.add(self.close)

    async def begin(self) -> None:
        """Submit the first batch. Raise TimeoutError after the deadline."""
        try:
            await self._in_time(self._submit())
        except BaseException:
            await self.close()
            raise

    async def _submit(self) -> None:
        if self._chunks:
            chunk = self._chunks.popleft()
            handle = await submit_lines(self._connection, chunk, expires_after=_KEPT)
            self._submitted.append((handle, chunk.custom_ids))

    async def groups(self, return_errors: bool) -> AsyncGenerator[list[RequestResult], None]:
        """Yield results in groups; cancel unfinished batches when the iteration ends.

        Raise TimeoutError after the deadline, and `RequestFailed` unless `return_errors`.
        """
        try:
            async with contextlib.aclosing(self._pages()) as pages:
                async for page in pages:
                    whole = page if return_errors else list(takewhile(lambda one: one.error is None, page))
                    yield whole
                    if len(whole) < len(page):
                        raise RequestFailed(page[len(whole)])
        finally:
            await self.close()

    async def _pages(self) -> AsyncGenerator[list[RequestResult], None]:
        while self._submitted:
            await self._in_time(self._submit())
            handle, custom_ids = self._submitted[0]
            order = InputOrder(custom_ids)
            pages, missing = handle.pages(), set(custom_ids)
            try:
                while (page := await self._in_time(_next(pages))) is not None:
                    missing.difference_update(one.custom_id for one in page)
                    if ready := order.add(page) if self._ordered else page:
                        yield ready
            finally:
                await pages.aclose()
            if missing:
                raise ClientError(f"{handle.id} ended without {len(missing)} of its results, such as {min(missing)}")
            self._submitted.popleft()

    async def close(self) -> None:
        """Cancel the batches whose results were not all read."""
        self._connection.at_close.discard(self.close)
        for chunk in self._chunks:
            chunk.file.close()
        self._chunks.clear()
        left = [handle.id for handle, _ in self._submitted]
        self._submitted.clear()
        await self._connection.cancel_batches(left)

    async def _in_time(self, work: Awaitable[T]) -> T:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        async with asyncio.timeout(left):
            return await work


async def _next(pages: AsyncGenerator[list[RequestResult], None]) -> list[RequestResult] | None:
    return await anext(pages, None)
