"""The asyncio client: batches, live calls and results of a server. `pipeline.py` has the same
client without asyncio.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_inference_pipeline import frames, vllm_shapes
from batch_inference_pipeline.batch_handle import AsyncBatchHandle, AsyncOpenBatch
from batch_inference_pipeline.input_files import endpoint_of
from batch_inference_pipeline.lines import encoded, line_of, spool
from batch_inference_pipeline.map_run import MAP_LINES, MapRun
from batch_inference_pipeline.results import RequestResult
from batch_inference_pipeline.rows import Rows
from batch_inference_pipeline.server_calls import decode_answer
from batch_inference_pipeline.server_connection import PATIENCE_SECONDS, ServerConnection
from batch_inference_pipeline.submission import open_batch, submit_file, submit_lines
from batch_inference_pipeline.vocabulary import CHAT, COMPLETIONS, EMBEDDINGS

if TYPE_CHECKING:
    import openai


class AsyncPipeline:
    """A client of the server at `base_url`, or of the fleet of `redis_url` and `file_store`. With
    neither it starts a private server that loads `model`.

    `options` are flags, such as `max_num_seqs=8`: those of `pipeline serve` for a private server,
    those of `pipeline api` for a fleet. For other servers `model` is the model of requests that
    name none; the default is the server's only model.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        redis_url: str | None = None,
        file_store: str | Path | None = None,
        patience: float = PATIENCE_SECONDS,
        **options: Any,
    ) -> None:
        """Set up the client; each call waits `patience` seconds for an unavailable server."""
        self.connection = ServerConnection(
            model=model,
            base_url=base_url,
            api_key=api_key,
            redis_url=redis_url,
            file_store=file_store,
            patience=patience,
            options=options,
        )

    async def __aenter__(self) -> "AsyncPipeline":
        await self.connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel unfinished batches of `map`, and end the processes that were started."""
        await self.connection.close()

    @property
    def client(self) -> "openai.AsyncOpenAI":
        """The official client, for calls that this class does not have."""
        return self.connection.calls.official

    async def model(self) -> str:
        """Return the model of requests that name none.

        Raise `ClientError` where there are several.
        """
        return await self.connection.model()

    async def submit(
        self,
        requests: Any,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        completion_window: str = "24h",
        metadata: dict[str, str] | None = None,
        rows: Rows | None = None,
        **parameters: Any,
    ) -> AsyncBatchHandle:
        """Create a batch from a file, the rows of a frame, or requests.

        A request is a text, a list of messages, a body, or a line of a batch. `parameters` are
        defaults for requests that do not set them; they are not allowed with a file.
        """
        if isinstance(requests, str | Path):
            check_file_options(Path(requests), {"model": model, "rows": rows, **parameters})
            with Path(requests).open("rb") as file:
                url = endpoint or await asyncio.to_thread(endpoint_of, Path(requests)) or CHAT
                return await submit_file(self.connection, Path(requests).name, file, url, completion_window, metadata)
        options = await self.connection.line_options(endpoint, model, parameters)
        spooled = await asyncio.to_thread(lambda: next(spool(frames.requests_of(requests, rows), options), None))
        if spooled is None:
            raise ValueError("there is no request to submit")
        return await submit_lines(self.connection, spooled, completion_window, metadata)

    def batch(self, batch_id: str) -> AsyncBatchHandle:
        """Return the handle of an existing batch."""
        return AsyncBatchHandle(self.connection, batch_id)

    async def open(
        self, endpoint: str = CHAT, *, completion_window: str = "24h", metadata: dict[str, str] | None = None
    ) -> AsyncOpenBatch:
        """Create a batch to which requests are appended while it runs."""
        return await open_batch(self.connection, endpoint, completion_window, metadata)

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
        rows: Rows | None = None,
        **parameters: Any,
    ) -> AsyncIterator[RequestResult]:
        """Yield the result of each request, in the order of the input or as they finish.

        Raise `RequestFailed` for a failed request, unless `return_errors`, and TimeoutError
        `timeout` seconds after the call. Leaving the iteration early cancels the rest.
        """
        deadline = await self.connection.deadline_of(timeout)
        options = await self.connection.line_options(endpoint, model, parameters)
        chunks = await asyncio.to_thread(lambda: list(spool(frames.requests_of(requests, rows), options, chunksize)))
        run = MapRun(self.connection, chunks, ordered, deadline)
        await run.begin()
        async with contextlib.aclosing(run.groups(return_errors)) as groups:
            async for group in groups:
                for result in group:
                    yield result

    async def map_frame(self, frame: Any, rows: Rows, *, column: str = "answer", **options: Any) -> Any:
        """Return the frame with a column of answers; `options` are those of `map`.

        With `return_errors` a failed row has null there, and the reason in COLUMN_error.
        """
        return frames.with_answers(
            frame, column, await self._in_order(frame, rows=rows, **options), options.get("return_errors")
        )

    async def submit_one(
        self, request: Any, *, endpoint: str | None = None, model: str | None = None, **parameters: Any
    ) -> RequestResult:
        """Make a live call. Raise errors of `openai`."""
        line = line_of(0, request, await self.connection.line_options(endpoint, model, parameters))
        answer = await self.connection.calls.post(line["url"].removeprefix("/v1"), encoded(line["body"]))
        body = decode_answer(answer)
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
        """Return all results of `map` in the order of the input."""
        return [one async for one in self.map(requests, ordered=True, **options)]


def check_file_options(path: Path, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a file's lines must set: the file is sent unchanged."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"'{given[0]}' cannot be given for the file {path}: set it in the lines of the file")
