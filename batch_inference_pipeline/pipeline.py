"""The client without asyncio: it runs the methods of `AsyncPipeline` in a thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_inference_pipeline import frames, vllm_shapes
from batch_inference_pipeline.async_pipeline import AsyncPipeline
from batch_inference_pipeline.batch_handle import AsyncBatchHandle, AsyncOpenBatch
from batch_inference_pipeline.lines import spool
from batch_inference_pipeline.loop_thread import EventLoopThread, LoopIterator
from batch_inference_pipeline.map_run import MAP_LINES, MapRun
from batch_inference_pipeline.results import RequestResult, TokenDelta
from batch_inference_pipeline.rows import Rows
from batch_inference_pipeline.vocabulary import CHAT

if TYPE_CHECKING:
    from openai.types import Batch


class Pipeline:
    """A client of the server at `base_url`, or of the fleet of `redis_url` and `file_store`. With
    neither it starts a private server that loads `model`. See `AsyncPipeline`.

    The constructor opens the client. `close`, the end of `with`, the end of the process, and the
    deletion of the client and of all objects that it returned end the processes it started.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Open the client. Raise `ServerFailed` if the processes that it starts cannot serve."""
        self._async = AsyncPipeline(model, **options)
        self._loop = EventLoopThread(self._async.close)
        try:
            self._loop.run(self._async.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished batches of `map`, and end the processes that were started.

        Calls that wait in other threads raise `ClientError`.
        """
        self._loop.close()

    @property
    def base_url(self) -> str:
        """The server's URL; below http://localhost for a started process with a Unix socket."""
        return self._async.connection.base_url

    @property
    def model(self) -> str:
        """The model of requests that name none. Raise `ClientError` if there are several."""
        return self._loop.run(self._async.model())

    def submit(self, requests: Any, **options: Any) -> "BatchHandle":
        """Create a batch, as `AsyncPipeline.submit`."""
        return BatchHandle(self._loop, self._loop.run(self._async.submit(requests, **options)))

    def batch(self, batch_id: str) -> "BatchHandle":
        """Return the handle of an existing batch."""
        return BatchHandle(self._loop, self._async.batch(batch_id))

    def open(self, endpoint: str = CHAT, **options: Any) -> "OpenBatchHandle":
        """Create a batch to which requests are appended while it runs."""
        return OpenBatchHandle(self._loop, self._loop.run(self._async.open(endpoint, **options)))

    def map(
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
    ) -> LoopIterator[RequestResult]:
        """Return an iterator over the results, in the order of the input or as they finish.

        As with `Executor.map`, the input is read and submitted at once. The iterator raises
        `RequestFailed` for a failed request, unless `return_errors`, and TimeoutError `timeout`
        seconds after the call. Closing or deleting it cancels the rest.
        """
        deadline = self._loop.run(self._async.connection.deadline_of(timeout))
        options = self._loop.run(self._async.connection.line_options(endpoint, model, parameters))
        chunks = list(spool(frames.requests_of(requests, rows), options, chunksize))  # in the caller's thread
        run = MapRun(self._async.connection, chunks, ordered, deadline)
        results = LoopIterator(self._loop, run.groups(return_errors), run.close)
        self._loop.run(run.begin())
        return results

    def map_frame(self, frame: Any, rows: Rows, *, column: str = "answer", **options: Any) -> Any:
        """Return the frame with a column of answers, as `AsyncPipeline.map_frame`."""
        return self._loop.run(self._async.map_frame(frame, rows, column=column, **options))

    def submit_one(self, request: Any, **options: Any) -> "Future[RequestResult]":
        """Start a live call and return its future."""
        return self._loop.start(self._async.submit_one(request, **options))

    def generate(
        self, prompts: Any, sampling_params: vllm_shapes.ParametersOfEach = None, **options: Any
    ) -> list[vllm_shapes.GeneratedOutput]:
        """Complete prompts, as vLLM's `LLM.generate`."""
        return self._loop.run(self._async.generate(prompts, sampling_params, **options))

    def chat(
        self, messages: Any, sampling_params: vllm_shapes.ParametersOfEach = None, **options: Any
    ) -> list[vllm_shapes.GeneratedOutput]:
        """Answer conversations, as vLLM's `LLM.chat`."""
        return self._loop.run(self._async.chat(messages, sampling_params, **options))

    def embed(self, texts: Any, **options: Any) -> list[vllm_shapes.EmbeddedOutput]:
        """Embed texts, as vLLM's `LLM.embed`."""
        return self._loop.run(self._async.embed(texts, **options))


class BatchHandle:
    """One batch of a server."""

    def __init__(self, loop: EventLoopThread, handle: AsyncBatchHandle) -> None:
        self.id = handle.id
        self._loop = loop
        self._handle = handle

    @property
    def status(self) -> str:
        """The batch's current state."""
        return self._loop.run(self._handle.status())

    def retrieve(self) -> "Batch":
        """Return the Batch object as it is now."""
        return self._loop.run(self._handle.retrieve())

    def wait(self, timeout: float | None = None) -> "Batch":
        """Return the Batch object once it has ended. Raise TimeoutError."""
        return self._loop.run(self._handle.wait(timeout))

    def cancel(self) -> "Batch":
        """Cancel the batch; finished results are kept."""
        return self._loop.run(self._handle.cancel())

    def results(self) -> Iterator[RequestResult]:
        """Yield every result once: answers as they finish, then failed requests.

        Raise `BatchFailed` if the server refused the lines of the batch.
        """
        return LoopIterator(self._loop, self._handle.pages())

    def tokens(self) -> Iterator[TokenDelta]:
        """Yield the text of all running requests as it is generated."""
        return LoopIterator(self._loop, self._handle.delta_groups())


class OpenBatchHandle(BatchHandle):
    """A batch to which requests are appended until it is closed."""

    def __init__(self, loop: EventLoopThread, handle: AsyncOpenBatch) -> None:
        super().__init__(loop, handle)
        self._open = handle

    def append(self, requests: Iterable[Any], **options: Any) -> dict[str, Any]:
        """Append requests, and return the server's counts of them; see `AsyncOpenBatch.append`."""
        return self._loop.run(self._open.append(list(frames.requests_of(requests, None)), **options))

    def close(self) -> "Batch":
        """Close the batch: it ends when all of its requests have ended."""
        return self._loop.run(self._open.close())
