"""The client: batches, live calls and results of a server, with asyncio. `pipeline.py` is the same
without.
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
        patience: float = PATIENCE_SECONDS,
        **options: Any,
    ) -> None:
        """`patience` is how many seconds each call waits for a server that is away."""
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
        """Cancel what `map` has not finished, and end the processes that were started."""
        await self.connection.close()

    @property
    def client(self) -> "openai.AsyncOpenAI":
        """The official client, for all that this one does not have."""
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
        """Create a batch of a file, of the rows of a frame, or of requests.

        A request is a text, a list of messages, a body, or a line of a batch; `parameters` are
        those of all that do not have them. The lines of a file have their own.
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
        """Return the handle of a batch that exists."""
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

        Raise `RequestFailed` in the place of one without an answer, unless `return_errors`, and
        TimeoutError `timeout` seconds after the call. Leaving early cancels the rest.
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
        """Return all results of a `map` that takes no other order."""
        return [one async for one in self.map(requests, ordered=True, **options)]


def check_file_options(path: Path, options: Mapping[str, Any]) -> None:
    """Raise ValueError for what a file's lines say themselves: the file is sent as it is."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"'{given[0]}' cannot be given for the file {path}, whose lines have it themselves: write it into them"
        )
