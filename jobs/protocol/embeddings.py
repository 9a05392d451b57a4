"""`/v1/embeddings`, in OpenAI's shapes, and `/v1/pooling`, in vLLM's."""

from collections.abc import Sequence
from typing import Any

from jobs.protocol.pooling_endpoint import PooledOutput, PoolingCall, PoolingEndpoint, PoolingHead
from jobs.protocol.pooling_parameters import EMBEDDINGS, POOLING


class EmbeddingsEndpoint(PoolingEndpoint):
    """Texts in, a vector for each out."""

    url = EMBEDDINGS
    tasks = ("embed",)
    prompt_field = "input"
    number_column = "embedding"
    id_prefix = "embd-"
    shows_vectors = True

    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": i, "embedding": output.encoded(call.encoding_format)}
            for i, output in enumerate(outputs)
        ]
        return {"object": "list", "data": data, "model": head.model, "usage": head.usage} | _dtype_of(call)


class VectorsEndpoint(PoolingEndpoint):
    """Texts in, the output of the model's pooler out.

    The output is a vector per text, a vector per token, or the numbers of a classification.
    """

    url = POOLING
    tasks = ("embed", "classify", "score")
    prompt_field = "input"
    id_prefix = "pool-"
    shows_vectors = True

    def engine_task(self, call: PoolingCall, tasks: Sequence[str]) -> str:
        return call.task or super().engine_task(call, tasks)

    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        data = [
            {"index": i, "object": "pooling", "data": output.encoded(call.encoding_format)}
            for i, output in enumerate(outputs)
        ]
        named = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return {**named, "data": data, "usage": head.usage} | _dtype_of(call)


def _dtype_of(call: PoolingCall) -> dict[str, str]:
    """Return the fields that describe the base64 encoding, if OpenAI's clients would misread it."""
    return {} if call.embed_dtype == "float32" else {"embed_dtype": call.embed_dtype}
