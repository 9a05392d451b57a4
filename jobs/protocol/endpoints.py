"""The endpoints that requests can be for, by url."""

from collections.abc import Collection

from jobs.protocol.chat import ChatEndpoint
from jobs.protocol.completions import CompletionsEndpoint
from jobs.protocol.endpoint import Endpoint

ENDPOINTS: dict[str, Endpoint] = {endpoint.url: endpoint for endpoint in (ChatEndpoint(), CompletionsEndpoint())}


def urls_for(tasks: Collection[str]) -> list[str]:
    """Return the endpoints that a model with these tasks answers."""
    return [url for url, endpoint in ENDPOINTS.items() if endpoint.task in tasks]
