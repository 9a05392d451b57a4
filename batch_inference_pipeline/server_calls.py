"""HTTP calls to a server that raise the errors of the official client."""

import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from batch_inference_pipeline.errors import ClientError
from batch_inference_pipeline.official import connection_error, official_client, status_error

if TYPE_CHECKING:
    import httpx2
    import openai

# The official client's values
_TIMEOUT = 600.0
_CONNECT_TIMEOUT = 5.0
_MOST_CONNECTIONS = 1000
_MOST_IDLE_CONNECTIONS = 100
_HEADERS = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}


class ServerCalls:
    """Calls to the server at `base_url`, or at the Unix socket `uds`.

    `before` is awaited before each request.
    """

    def __init__(self, base_url: str, api_key: str, uds: str, before: Callable[[Any], Awaitable[None]]) -> None:
        import httpx2

        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._official: openai.AsyncOpenAI | None = None
        headers = {name: os.environ[variable] for name, variable in _HEADERS.items() if os.environ.get(variable)}
        limits = httpx2.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_IDLE_CONNECTIONS)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}", **headers},
            timeout=httpx2.Timeout(_TIMEOUT, connect=_CONNECT_TIMEOUT),
            limits=limits,
            follow_redirects=True,
            # A proxy set in the environment cannot reach a socket
            transport=httpx2.AsyncHTTPTransport(uds=uds, limits=limits) if uds else None,
            trust_env=not uds,
            event_hooks={"request": [before]},
        )

    @property
    def official(self) -> "openai.AsyncOpenAI":
        """The official client of the same server."""
        if self._official is None:
            self._official = official_client(self._http, self._base_url, self._api_key)
        return self._official

    async def get(self, path: str, **options: Any) -> "httpx2.Response":
        """Return the answer. Raise `openai.APIStatusError` and `openai.APIConnectionError`."""
        return await self.send("GET", path, **options)

    async def post(
        self,
        path: str,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> "httpx2.Response":
        """Return the answer. Raise the errors of `get`."""
        return await self.send("POST", path, content=body, headers={"Content-Type": content_type, **(headers or {})})

    async def send(self, method: str, path: str, **options: Any) -> "httpx2.Response":
        """Return the answer; `options` are those of httpx2. Raise the errors of `get`."""
        response = await self._request(method, self._base_url + path, **options)
        if not response.is_success:
            raise await status_error(response)
        return response

    async def probe(self, path: str) -> Any:
        """Return the answer of a path outside `/v1`; None for a status of 500 or above.

        Raise the errors of `get`.
        """
        response = await self._request("GET", self._base_url.removesuffix("/v1") + path)
        if response.is_success:
            return decode_answer(response)
        if response.status_code < 500:
            raise await status_error(response)
        return None

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **options: Any) -> AsyncGenerator["httpx2.Response", None]:
        """Open a streamed answer. Raise the errors of `get`."""
        async with _official_errors(), self._http.stream("GET", self._base_url + path, **options) as response:
            if not response.is_success:
                await response.aread()
                raise await status_error(response)
            yield response

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _request(self, method: str, url: str, **options: Any) -> "httpx2.Response":
        async with _official_errors():
            return await self._http.request(method, url, **options)


def decode_answer(response: "httpx2.Response") -> Any:
    """Return the JSON of an answer. Raise `ClientError`."""
    try:
        return msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kind = response.headers.get("content-type") or "something else"
        raise ClientError(f"{response.request.url} sent {kind} in place of JSON: check base_url") from None


@contextlib.asynccontextmanager
async def _official_errors() -> AsyncGenerator[None, None]:
    import httpx2

    try:
        yield
    except httpx2.RequestError as error:
        raise await connection_error(error, isinstance(error, httpx2.TimeoutException)) from error
