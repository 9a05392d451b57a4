"""The client: batches, live calls and results of a server, with asyncio. `pipeline.py` is the same
without.
"""

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

from jobs.batch.row_requests import RowOptions
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.pooling_parameters import EMBEDDINGS
from jobs.protocol.states import END_STATES
from jobs.store.idempotency import HEADER
from pipeline.api_client import is_passing
from pipeline.client import frames, vllm_shapes
from pipeline.client.errors import BatchFailed, ClientError
from pipeline.client.lines import LineOptions, SpooledLines, encoded, line_of, spool
from pipeline.client.local_server import LocalServer
from pipeline.client.results import (
    InputOrder,
    RequestFailed,
    RequestResult,
    TokenDelta,
    TokenDeltas,
    decode_results,
)
from pipeline.remote_batches import endpoint_of
from pipeline.remote_tail import EventParser

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

T = TypeVar("T")

MAP_LINES = 50_000  # of one batch of `map`: as many as a server takes by default
_PATIENCE_SECONDS = 60.0
_CHECK_SECONDS = 1.0
_UNDO_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LONGEST_READY_PAUSE = 0.1
_SILENCE_SECONDS = 60.0  # a stream sends something at least every 15 s
_PAGE_LINES = 2000
_KEPT = {"anchor": "created_at", "seconds": 86_400}  # of what `map` uploads and gets


class AsyncPipeline:
    """A client of `base_url`, of a fleet's `redis_url` and `file_store`, or, with neither, of a
    server of its own that loads `model`.

    A server of its own takes the flags of `pipeline serve` as `options`, and a fleet those of
    `pipeline api`: `max_num_seqs=8`. For other servers `model` names the model of requests that
    name none; by default it is the only one.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        redis_url: str | None = None,
        file_store: str | Path | None = None,
        patience: float = _PATIENCE_SECONDS,
        **options: Any,
    ) -> None:
        """`patience` is how many seconds each call waits for a server that is away."""
        check_places(base_url, redis_url, file_store, options)
        self._base_url, self._api_key, self._patience = base_url, api_key, patience
        self._own = base_url is None and redis_url is None
        self._model = None if self._own or model is None else str(model)
        self._server: LocalServer | None = None
        if base_url is None:
            flags = {**({"model": model} if self._own and model is not None else {}), **options}
            self._server = LocalServer(redis_url, None if file_store is None else str(file_store), flags)
        self._client: openai.AsyncOpenAI | None = None
        self._watch: asyncio.Task[None] | None = None
        self._maps: set[MapRun] = set()
        self._creating: set[asyncio.Task[Batch]] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "AsyncPipeline":
        try:
            if self._server is not None:
                self._server.start()  # before the import, which takes a while
            await self._connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def _connect(self) -> None:
        import openai

        url, http = self._base_url, None
        if self._server is not None:
            await self._server.wait_until_listening()
            self._watch = asyncio.create_task(self._keep_running(self._server))
            url, http = "http://localhost/v1", _http_client(self._server.uds)
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=self._api_key or "none", max_retries=0, http_client=http
        )
        if self._own:
            await self._wait_ready()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what `map` has not finished, and end the processes that were started."""
        try:
            for run in list(self._maps):
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(run.close(), _CHECK_SECONDS)
            for creating in self._creating:
                self._in_background(self._cancel_created(creating))
            if self._background:
                await asyncio.wait(self._background, timeout=_UNDO_SECONDS)
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            if self._client is not None:
                await self._client.close()
        finally:
            if self._server is not None:
                await self._server.stop()

    @property
    def client(self) -> "openai.AsyncOpenAI":
        """The official client, for all that this one does not have."""
        if self._client is None:
            raise ClientError("the client is not open: use it in `async with AsyncPipeline(…) as p`")
        return self._client

    async def model(self) -> str:
        """Return the model of requests that name none.

        Raise `ClientError` where there are several.
        """
        if self._model is None:
            names = [one.id for one in (await self.patiently(self.client.models.list)).data]
            if len(names) != 1:
                raise ClientError(f"the server has {len(names)} models ({', '.join(names)}): name one with model=…")
            self._model = names[0]
        return self._model

    async def submit(
        self,
        requests: Any,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        completion_window: str = "24h",
        metadata: dict[str, str] | None = None,
        rows: RowOptions | None = None,
        **parameters: Any,
    ) -> "AsyncBatchHandle":
        """Create a batch of a file, of the rows of a frame, or of requests.

        A request is a text, a list of messages, a body, or a line of a batch; `parameters` are
        those of all that do not have them. The lines of a file have their own.
        """
        if isinstance(requests, str | Path):
            check_file_options(Path(requests), {"model": model, "rows": rows, **parameters})
            with Path(requests).open("rb") as file:
                url = endpoint or await asyncio.to_thread(endpoint_of, Path(requests)) or CHAT
                return await self.submit_file(Path(requests).name, file, url, completion_window, metadata)
        options = await self.line_options(endpoint, model, parameters)
        spooled = await asyncio.to_thread(lambda: next(spool(frames.requests_of(requests, rows), options), None))
        if spooled is None:
            raise ValueError("there is no request to submit")
        return await self.submit_lines(spooled, completion_window, metadata)

    async def submit_lines(
        self, spooled: SpooledLines, window: str = "24h", metadata: dict[str, str] | None = None, **options: Any
    ) -> "AsyncBatchHandle":
        """Create a batch of lines in a temporary file, which is closed."""
        with spooled.file as file:
            return await self.submit_file("requests.jsonl", file, spooled.endpoint, window, metadata, **options)

    async def submit_file(
        self,
        name: str,
        file: IO[bytes],
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        expires_after: dict[str, Any] | None = None,
    ) -> "AsyncBatchHandle":
        """Upload a file and create a batch of it; each happens once, however often it is sent."""
        once = _once()
        expiry: Any = {} if expires_after is None else {"expires_after": expires_after}

        async def upload() -> Any:
            file.seek(0)
            return await self.client.files.create(file=(name, file), purpose="batch", extra_headers=once, **expiry)

        uploaded = await self.patiently(upload)
        wanted: Any = {"input_file_id": uploaded.id, "endpoint": endpoint, "completion_window": window}
        if metadata:
            wanted["metadata"] = metadata
        if expires_after is not None:
            wanted["output_expires_after"] = expires_after
        again = _once()
        try:
            batch = await self._created(lambda: self.client.batches.create(**wanted, extra_headers=again))
        except BaseException:
            self._in_background(self.client.files.delete(uploaded.id))  # a batch that was made has its own
            raise
        return AsyncBatchHandle(self, batch)

    def batch(self, batch_id: str) -> "AsyncBatchHandle":
        """Return the handle of a batch that exists."""
        return AsyncBatchHandle(self, batch_id)

    async def open(
        self, endpoint: str = CHAT, *, completion_window: str = "24h", metadata: dict[str, str] | None = None
    ) -> "AsyncOpenBatch":
        """Create a batch to which requests are appended while it runs."""
        from openai.types import Batch

        body = {"input": "stream", "endpoint": endpoint, "completion_window": completion_window}
        options: Any = {"headers": _once()}
        wanted = {**body, **({"metadata": metadata} if metadata else {})}
        batch = await self._created(lambda: self.client.post("/batches", cast_to=Batch, body=wanted, options=options))
        return AsyncOpenBatch(self, batch)

    async def map(
        self,
        requests: Any,
        *,
        ordered: bool = True,
        timeout: float | None = None,
        return_errors: bool = False,
        chunksize: int = MAP_LINES,
        endpoint: str | None = None,
        model: str | None = None,
        rows: RowOptions | None = None,
        **parameters: Any,
    ) -> AsyncIterator[RequestResult]:
        """Yield the result of each request, in the order of the input or as they finish.

        Raise `RequestFailed` in the place of one without an answer, unless `return_errors`, and
        TimeoutError `timeout` seconds after the call. Leaving early cancels the rest.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        options = await self.line_options(endpoint, model, parameters)
        chunks = await asyncio.to_thread(lambda: list(spool(frames.requests_of(requests, rows), options, chunksize)))
        run = MapRun(self, chunks, ordered, deadline)
        await run.begin()
        async with contextlib.aclosing(run.groups(return_errors)) as groups:
            async for group in groups:
                for result in group:
                    yield result

    async def map_frame(self, frame: Any, rows: RowOptions, *, column: str = "answer", **options: Any) -> Any:
        """Return the frame with a column of answers, as `map` gets them.

        With `return_errors` a row without one has null there, and the reason in COLUMN_error.
        """
        return frames.with_answers(
            frame, column, await self._in_order(frame, rows=rows, **options), options.get("return_errors")
        )

    async def submit_one(
        self, request: Any, *, endpoint: str | None = None, model: str | None = None, **parameters: Any
    ) -> RequestResult:
        """Make a live call. Raises errors of `openai`."""
        line = line_of(0, request, await self.line_options(endpoint, model, parameters))
        body = await self.client.post(line["url"].removeprefix("/v1"), cast_to=object, body=line["body"])
        return RequestResult(custom_id=line["custom_id"], response={"status_code": 200, "body": body})

    async def generate(
        self, prompts: Any, sampling_params: vllm_shapes.ParametersOfEach = None, **options: Any
    ) -> list[vllm_shapes.GeneratedOutput]:
        """Complete prompts, as vLLM's `LLM.generate`."""
        bodies = vllm_shapes.bodies_of(COMPLETIONS, vllm_shapes.as_prompts(prompts), sampling_params)
        return vllm_shapes.generated(bodies, await self._in_order(bodies, endpoint=COMPLETIONS, **options))

    async def chat(
        self, messages: Any, sampling_params: vllm_shapes.ParametersOfEach = None, **options: Any
    ) -> list[vllm_shapes.GeneratedOutput]:
        """Answer conversations, as vLLM's `LLM.chat`."""
        bodies = vllm_shapes.bodies_of(CHAT, vllm_shapes.as_conversations(messages), sampling_params)
        return vllm_shapes.generated(bodies, await self._in_order(bodies, endpoint=CHAT, **options))

    async def embed(self, texts: Any, **options: Any) -> list[vllm_shapes.EmbeddedOutput]:
        """Embed texts, as vLLM's `LLM.embed`."""
        bodies = vllm_shapes.bodies_of(EMBEDDINGS, vllm_shapes.as_prompts(texts), None)
        return vllm_shapes.embedded(bodies, await self._in_order(bodies, endpoint=EMBEDDINGS, **options))

    async def _in_order(self, requests: Any, **options: Any) -> list[RequestResult]:
        """Return all results of a `map` that takes no other order."""
        return [one async for one in self.map(requests, ordered=True, **options)]

    async def line_options(self, endpoint: str | None, model: str | None, parameters: dict[str, Any]) -> LineOptions:
        """Return what lines have that do not say otherwise."""
        return LineOptions(model or await self.model(), endpoint, parameters)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that may be repeated while the server is away, or busy with the first."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            self.check_server()
            try:
                return await call()
            except Exception as error:
                in_use = getattr(error, "code", None) == "idempotency_key_in_use"
                if not (in_use or is_passing(error)) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _created(self, call: Callable[[], Awaitable["Batch"]]) -> "Batch":
        """Create a batch. One whose caller leaves meanwhile, who has no id of it, is cancelled."""
        creating = asyncio.create_task(self.patiently(call))
        self._creating.add(creating)
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._in_background(self._cancel_created(creating))
            raise
        finally:
            self._creating.discard(creating)

    async def _cancel_created(self, creating: "asyncio.Task[Batch]") -> None:
        await self.client.batches.cancel((await creating).id)

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Do what no caller waits for; closing gives it some seconds."""

        async def quietly() -> None:
            with contextlib.suppress(Exception):
                await work

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def check_server(self) -> None:
        """Raise `ServerFailed` where the processes that were started ended for good."""
        if self._watch is not None and self._watch.done() and not self._watch.cancelled():
            self._watch.result()

    def track(self, run: "MapRun", running: bool) -> None:
        """Note a map that closing has to cancel, or that ended."""
        (self._maps.add if running else self._maps.discard)(run)

    async def _keep_running(self, server: LocalServer) -> None:
        while True:
            server.check()
            await asyncio.sleep(_CHECK_SECONDS)

    async def _wait_ready(self) -> None:
        import openai

        url = str(self.client.base_url).rstrip("/").removesuffix("/v1") + "/ready"
        pause = _FIRST_PAUSE
        while True:
            self.check_server()
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                await self.client.get(url, cast_to=object)
                return
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_READY_PAUSE)


class AsyncBatchHandle:
    """One batch of a server."""

    def __init__(self, pipeline: AsyncPipeline, batch: "Batch | str") -> None:
        self.id: str = batch if isinstance(batch, str) else batch.id
        self.pipeline = pipeline
        self._path = f"/batches/{quote(self.id, safe='')}"

    async def retrieve(self) -> "Batch":
        """Return the Batch object as it is now."""
        return await self.pipeline.patiently(lambda: self.pipeline.client.batches.retrieve(self.id))

    async def status(self) -> str:
        """Return its state now."""
        return (await self.retrieve()).status

    async def wait(self, timeout: float | None = None) -> "Batch":
        """Return the Batch object once it has ended. Raise TimeoutError."""
        async with asyncio.timeout(timeout):
            pause = _FIRST_PAUSE
            while (batch := await self.retrieve()).status not in END_STATES:
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
            return batch

    async def cancel(self) -> "Batch":
        """End it early; what is finished stays."""
        return await self.pipeline.patiently(lambda: self.pipeline.client.batches.cancel(self.id))

    async def results(self) -> AsyncIterator[RequestResult]:
        """Yield every result once, as they finish; those without an answer at the end.

        Raise `BatchFailed` for a batch whose lines were refused.
        """
        async for page in self.pages():
            for result in page:
                yield result

    async def pages(self) -> AsyncGenerator[list[RequestResult], None]:
        """The same in groups.

        A line of the results has the same offset for good, so that none comes twice or is left out
        however often the connection is cut.
        """
        offset, pause, began = 0, _FIRST_PAUSE, time.monotonic()
        while True:
            batch = await self.retrieve()  # before the lines, so that an ended one has all of them
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
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        if batch.status == "failed":
            raise BatchFailed(_why_failed(batch))
        if batch.error_file_id is not None:
            yield await self._read_errors(batch.error_file_id)

    async def tokens(self) -> AsyncIterator[TokenDelta]:
        """Yield the text of all running requests while it is generated."""
        async with contextlib.aclosing(self.delta_groups()) as groups:
            async for group in groups:
                for delta in group:
                    yield delta

    async def delta_groups(self) -> AsyncGenerator[list[TokenDelta], None]:
        """The same in groups."""
        deltas, last_id, received = TokenDeltas(), None, time.monotonic()
        while True:
            try:
                async for event in self._events(last_id):
                    received = time.monotonic()
                    if event is None:
                        continue
                    if event.data == "[DONE]":
                        return
                    value = json.loads(event.data)
                    if "error" in value:
                        break  # the server cannot reach its queue, and may soon
                    last_id = event.id or last_id
                    if value.get("object") != "batch":
                        yield deltas.add(value)
            except Exception as error:
                if not is_passing(error):
                    raise
            if time.monotonic() - received > _PATIENCE_SECONDS:
                raise ClientError(f"the server has not sent the tokens of {self.id} for {_PATIENCE_SECONDS:.0f} s")
            self.pipeline.check_server()
            await asyncio.sleep(_LONGEST_PAUSE)

    async def _events(self, last_id: str | None) -> AsyncIterator[Any]:
        import openai

        options: Any = {
            "headers": {} if last_id is None else {"Last-Event-ID": last_id},
            "timeout": _SILENCE_SECONDS,
        }
        stream = await self.pipeline.client.get(
            f"{self._path}/stream", cast_to=object, stream=True, stream_cls=openai.AsyncStream[object], options=options
        )
        parser = EventParser()
        try:
            async for chunk in stream.response.aiter_bytes():
                yield None  # a comment too says that the server is there
                for event in parser.feed(chunk):
                    yield event
        finally:
            await stream.close()

    async def _read(self, file_id: str, offset: int) -> tuple[list[RequestResult], int, bool]:
        files = self.pipeline.client.files.with_raw_response
        query = {"offset": offset, "limit": _PAGE_LINES}
        answer = await self.pipeline.patiently(lambda: files.content(file_id, extra_query=query))
        head: Mapping[str, str] = answer.headers
        return decode_results(answer.content), int(head["x-last-line"]), head["x-incomplete"] == "true"

    async def _read_errors(self, file_id: str) -> list[RequestResult]:
        answer = await self.pipeline.patiently(lambda: self.pipeline.client.files.content(file_id))
        return decode_results(answer.content)


class AsyncOpenBatch(AsyncBatchHandle):
    """A batch to which requests are appended until it is closed."""

    def __init__(self, pipeline: AsyncPipeline, batch: "Batch") -> None:
        super().__init__(pipeline, batch)
        self._endpoint = batch.endpoint
        self._appended = 0
        self._prefix = secrets.token_hex(4)  # another client's names are other ones

    async def append(self, requests: Iterable[Any], *, model: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Append requests, as of `submit`, and return what became of them; they are on disk then.

        The client repeats a call that is cut: a line is known by its `custom_id`. So name requests
        that you append again by yourself after an error.
        """
        options = await self.pipeline.line_options(self._endpoint, model, parameters)
        body = await asyncio.to_thread(self._encode, list(frames.requests_of(requests, None)), options)
        if not body:
            raise ValueError("there is no request to append")
        headers: Any = {"headers": {"Content-Type": "application/jsonl"}}
        made = await self.pipeline.patiently(
            lambda: self.pipeline.client.post(f"{self._path}/requests", cast_to=object, content=body, options=headers)
        )
        return cast(dict[str, Any], made)

    async def close(self) -> "Batch":
        """Let it end once all of its requests have."""
        from openai.types import Batch

        return await self.pipeline.patiently(lambda: self.pipeline.client.post(f"{self._path}/close", cast_to=Batch))

    def _encode(self, requests: list[Any], options: LineOptions) -> bytes:
        lines = []
        for request in requests:
            line = line_of(self._appended, request, options)
            if not (isinstance(request, dict) and request.get("custom_id")):
                line["custom_id"] = f"{self._prefix}-{self._appended}"
            self._appended += 1
            lines.append(encoded(line))
        return b"".join(lines)


class MapRun:
    """The batches of one `map`, of which two are submitted at a time."""

    def __init__(
        self, pipeline: AsyncPipeline, chunks: list[SpooledLines], ordered: bool, deadline: float | None
    ) -> None:
        self._pipeline = pipeline
        self._chunks = deque(chunks)
        self._ordered = ordered
        self._deadline = deadline
        self._submitted: deque[tuple[AsyncBatchHandle, list[str]]] = deque()
        pipeline.track(self, True)

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
            handle = await self._pipeline.submit_lines(chunk, expires_after=_KEPT)
            self._submitted.append((handle, chunk.custom_ids))

    async def groups(self, return_errors: bool) -> AsyncGenerator[list[RequestResult], None]:
        """Yield results in groups, and cancel what is left of them when this is left.

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
                raise ClientError(f"{handle.id} has ended without {len(missing)} of its results: {min(missing)} is one")
            self._submitted.popleft()

    async def close(self) -> None:
        """Cancel what has not been read to its end."""
        self._pipeline.track(self, False)
        for chunk in self._chunks:
            chunk.file.close()
        self._chunks.clear()
        while self._submitted:
            handle, _ = self._submitted.popleft()
            with contextlib.suppress(Exception):  # it ended by itself, or there is no server any more
                await self._pipeline.client.batches.cancel(handle.id)

    async def _in_time(self, work: Awaitable[T]) -> T:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        async with asyncio.timeout(left):
            return await work


async def _next(pages: AsyncGenerator[list[RequestResult], None]) -> list[RequestResult] | None:
    return await anext(pages, None)


def _http_client(uds: str) -> Any:
    """Return a client of a Unix socket, which no proxy of the environment is asked for."""
    import openai

    # httpx or httpx2, by the version of openai
    library = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]]
    transport = library.AsyncHTTPTransport(uds=uds, limits=openai.DEFAULT_CONNECTION_LIMITS)
    return openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)


def check_places(
    base_url: str | None, redis_url: str | None, file_store: str | Path | None, options: dict[str, Any]
) -> None:
    """Raise ValueError where the arguments name more than one place, or half of one."""
    if base_url is not None and (redis_url or file_store or options):
        other = next(iter(options), "redis_url" if redis_url else "file_store")
        raise ValueError(f"'{other}' is for processes that the client starts; the server at base_url has its own")
    if given := [name for name in options if name in ("host", "port", "uds") or name.startswith("ssl_")]:
        raise ValueError(f"'{given[0]}' cannot be given: processes that the client starts listen to it alone")
    if (redis_url is None) != (file_store is None):
        raise ValueError("a fleet is named by redis_url and file_store, the file store that its processes use")


def check_file_options(path: Path, options: Mapping[str, Any]) -> None:
    """Raise ValueError for what a file's lines say themselves: the file is sent as it is."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"'{given[0]}' cannot be given for the file {path}, whose lines have it themselves: write it into them"
        )


def _pause_before_end(batch: "Batch", seconds: float) -> float:
    """Return a pause that grows while a batch has far to go, and shrinks towards its end."""
    counts = batch.request_counts
    if counts is None or not counts.completed:
        return _FIRST_PAUSE
    left = seconds * (counts.total - counts.completed - counts.failed) / counts.completed
    return min(max(_FIRST_PAUSE, left / 4), _LONGEST_PAUSE)


def _once() -> dict[str, str]:
    return {HEADER: secrets.token_hex(16)}


def _why_failed(batch: "Batch") -> str:
    problems = (batch.errors.data if batch.errors is not None else None) or []
    if not problems:
        return f"{batch.id} was refused"
    first = problems[0]
    where = f" in line {first.line}" if first.line is not None else ""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{batch.id} was refused{where}: {first.message}{more}"
