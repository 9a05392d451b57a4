"""A Python client: `Pipeline`, and `AsyncPipeline` for asyncio (`docs/client.md`).

A name is imported at its first use: the command line imports single modules of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_inference_pipeline.async_pipeline import AsyncPipeline
    from batch_inference_pipeline.batch_handle import AsyncBatchHandle, AsyncOpenBatch
    from batch_inference_pipeline.errors import BatchFailed, ClientError, ServerFailed
    from batch_inference_pipeline.pipeline import BatchHandle, OpenBatchHandle, Pipeline
    from batch_inference_pipeline.results import RequestFailed, RequestResult, TokenDelta
    from batch_inference_pipeline.rows import Rows
    from batch_inference_pipeline.vllm_shapes import SamplingParams

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

_MODULE_OF = {
    "AsyncBatchHandle": "batch_handle",
    "AsyncOpenBatch": "batch_handle",
    "AsyncPipeline": "async_pipeline",
    "BatchFailed": "errors",
    "BatchHandle": "pipeline",
    "ClientError": "errors",
    "OpenBatchHandle": "pipeline",
    "Pipeline": "pipeline",
    "RequestFailed": "results",
    "RequestResult": "results",
    "Rows": "rows",
    "SamplingParams": "vllm_shapes",
    "ServerFailed": "errors",
    "TokenDelta": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
