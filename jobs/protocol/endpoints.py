"""The endpoints that requests can be for, by url."""

import uuid

from jobs.protocol.chat import ChatEndpoint
from jobs.protocol.completions import CompletionsEndpoint
from jobs.protocol.endpoint import Endpoint

ENDPOINTS: dict[str, Endpoint] = {endpoint.url: endpoint for endpoint in (ChatEndpoint(), CompletionsEndpoint())}


def new_body_id(endpoint: Endpoint) -> str:
    """Return an `id` for a response body; a stream carries one through all its chunks."""
    return endpoint.id_prefix + uuid.uuid4().hex
