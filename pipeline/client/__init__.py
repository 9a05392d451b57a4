"""A Python client: `Pipeline`, and `AsyncPipeline` for asyncio (`docs/client.md`)."""

from jobs.batch.row_requests import RowOptions as Rows
from pipeline.client.async_pipeline import AsyncPipeline
from pipeline.client.batch_handle import AsyncBatchHandle, AsyncOpenBatch
from pipeline.client.errors import BatchFailed, ClientError, ServerFailed
from pipeline.client.pipeline import BatchHandle, OpenBatchHandle, Pipeline
from pipeline.client.results import RequestFailed, RequestResult, TokenDelta
from pipeline.client.vllm_shapes import GenerationParameters as SamplingParams

__all__ = [
    "AsyncBatchHandle",
    "AsyncOpenBatch",
    "AsyncPipeline",
    "BatchFailed",
    "BatchHandle",
    "ClientError",
    "OpenBatchHandle",
    "Pipeline",
    "RequestFailed",
    "RequestResult",
    "Rows",
    "SamplingParams",
    "ServerFailed",
    "TokenDelta",
]
