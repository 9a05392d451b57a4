"""The registry of endpoints, by url."""

from collections.abc import Collection

from jobs.protocol import fields
from jobs.protocol.chat import ChatEndpoint
from jobs.protocol.classification import ClassifyEndpoint
from jobs.protocol.completions import CompletionsEndpoint
from jobs.protocol.embeddings import EmbeddingsEndpoint, VectorsEndpoint
from jobs.protocol.endpoint import BatchEndpoint, Endpoint, TextEndpoint
from jobs.protocol.pooling_endpoint import PoolingEndpoint
from jobs.protocol.results import ApiError
from jobs.protocol.scores import RerankEndpoint, ScoreEndpoint
from jobs.protocol.tokenization import DetokenizeEndpoint, TokenizeEndpoint, TokenizerEndpoint

ENDPOINTS: dict[str, TextEndpoint] = {endpoint.url: endpoint for endpoint in (ChatEndpoint(), CompletionsEndpoint())}
"""Endpoints that generate text."""

POOLING_ENDPOINTS: dict[str, PoolingEndpoint] = {
    endpoint.url: endpoint
    for endpoint in (EmbeddingsEndpoint(), ScoreEndpoint(), RerankEndpoint(), ClassifyEndpoint(), VectorsEndpoint())
}
"""Endpoints that return numbers for texts."""

BATCH_ENDPOINTS: dict[str, BatchEndpoint] = {**ENDPOINTS, **POOLING_ENDPOINTS}
"""Endpoints of live calls and of batch lines."""

TOKENIZER_ENDPOINTS: dict[str, TokenizerEndpoint] = {
    endpoint.url: endpoint for endpoint in (TokenizeEndpoint(), DetokenizeEndpoint())
}
"""Endpoints that need only the tokenizer; for live calls only."""

ALL_ENDPOINTS: dict[str, Endpoint] = {**BATCH_ENDPOINTS, **TOKENIZER_ENDPOINTS}


BATCH_URLS = {name: url for url, endpoint in BATCH_ENDPOINTS.items() for name in (url, *endpoint.aliases)}
"""The url of the endpoint that each url of a line means, by that or by an alias."""


def urls_for(tasks: Collection[str]) -> list[str]:
    """Return the endpoints that a model with these tasks answers."""
    return [url for url, endpoint in ALL_ENDPOINTS.items() if not set(endpoint.tasks).isdisjoint(tasks)]


def check_answers(model: str, tasks: Collection[str], url: str, param: str = "model") -> None:
    """Raise `ApiError` 400 unless a model with these tasks answers an endpoint.

    `param` names the model.
    """
    urls = urls_for(tasks)
    if url not in urls:
        message = (
            f"The model `{fields.shown(model)}` cannot be used with {url}. It answers: {', '.join(urls) or 'none'}."
        )
        raise ApiError(400, message, param=param, code="unsupported_endpoint")
