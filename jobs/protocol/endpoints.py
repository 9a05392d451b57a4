"""The endpoints that calls can be for, by url."""

from collections.abc import Collection

from jobs.protocol.chat import ChatEndpoint
from jobs.protocol.completions import CompletionsEndpoint
from jobs.protocol.endpoint import Endpoint, TextEndpoint
from jobs.protocol.tokenization import DetokenizeEndpoint, TokenizeEndpoint, TokenizerEndpoint

ENDPOINTS: dict[str, TextEndpoint] = {endpoint.url: endpoint for endpoint in (ChatEndpoint(), CompletionsEndpoint())}
"""Those of text in and text out: of live calls and of the lines of batches."""

TOKENIZER_ENDPOINTS: dict[str, TokenizerEndpoint] = {
    endpoint.url: endpoint for endpoint in (TokenizeEndpoint(), DetokenizeEndpoint())
}
"""Those that the tokenizer alone answers: of live calls."""

_ALL: dict[str, Endpoint] = {**ENDPOINTS, **TOKENIZER_ENDPOINTS}


def urls_for(tasks: Collection[str]) -> list[str]:
    """Return the endpoints that a model with these tasks answers."""
    return [url for url, endpoint in _ALL.items() if endpoint.task in tasks]
