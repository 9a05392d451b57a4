"""Creation of batches on a server, with asyncio: from a file, from lines, or open."""

from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from batch_inference_pipeline.batch_handle import AsyncBatchHandle, AsyncOpenBatch
from batch_inference_pipeline.idempotency import new_header
from batch_inference_pipeline.lines import SpooledLines
from batch_inference_pipeline.server_calls import decode_answer
from batch_inference_pipeline.server_connection import ServerConnection

if TYPE_CHECKING:
    import httpx2


async def submit_lines(
    connection: ServerConnection,
    spooled: SpooledLines,
    window: str = "24h",
    metadata: Mapping[str, str] | None = None,
    expires_after: Mapping[str, Any] | None = None,
) -> AsyncBatchHandle:
    """Create a batch from lines in a temporary file, and close the file."""
    with spooled.file as file:
        return await submit_file(connection, "requests.jsonl", file, spooled.endpoint, window, metadata, expires_after)


async def submit_file(
    connection: ServerConnection,
    name: str,
    file: IO[bytes],
    endpoint: str,
    window: str,
    metadata: Mapping[str, str] | None,
    expires_after: Mapping[str, Any] | None = None,
) -> AsyncBatchHandle:
    """Upload a file and create a batch from it, each exactly once despite repeated calls."""
    file_id, calls = await _upload(connection, name, file, expires_after), connection.calls
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    options = {"metadata": metadata, "output_expires_after": expires_after}
    try:
        state = await connection.create_batch({**body, **_present(options)}, new_header())
    except BaseException:
        # A batch that was created nevertheless has a copy of the input
        connection.in_background(calls.send("DELETE", f"/files/{quote(file_id)}"))
        raise
    return AsyncBatchHandle(connection, state.id)


async def open_batch(
    connection: ServerConnection, endpoint: str, window: str, metadata: Mapping[str, str] | None
) -> AsyncOpenBatch:
    """Create a batch to which requests are appended while it runs."""
    body = {"input": "stream", "endpoint": endpoint, "completion_window": window}
    state = await connection.create_batch({**body, **_present({"metadata": metadata})}, new_header())
    return AsyncOpenBatch(connection, state)


async def _upload(
    connection: ServerConnection, name: str, file: IO[bytes], expires_after: Mapping[str, Any] | None
) -> str:
    form = {"purpose": "batch"} | {f"expires_after[{key}]": str(value) for key, value in (expires_after or {}).items()}
    key = new_header()

    async def upload() -> "httpx2.Response":
        file.seek(0)
        return await connection.calls.send("POST", "/files", data=form, files={"file": (name, file)}, headers=key)

    return str(decode_answer(await connection.patiently(upload))["id"])


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}
