"""The connection to a server: starts its processes, repeats calls while it is unavailable, and
cancels batches that a caller abandons.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batch_inference_pipeline.batch_state import BatchState, path_of, state_of
from batch_inference_pipeline.errors import ClientError, ServerFailed
from batch_inference_pipeline.lines import LineOptions, encoded
from batch_inference_pipeline.local_server import LocalServer
from batch_inference_pipeline.passing import is_passing
from batch_inference_pipeline.server_calls import ServerCalls, decode_answer

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
_CHECK_SECONDS = 1.0
_UNDO_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
_LONGEST_READY_PAUSE = 0.1
_NEED_NO_MODEL = ("/v1/batches", "/v1/files", "/v1/uploads")


class ServerConnection:
    """A server at `base_url`, an API process of the fleet of `redis_url`, or a private server."""

    def __init__(
        self,
        *,
        model: str | Path | None,
        base_url: str | None,
        api_key: str | None,
        redis_url: str | None,
        file_store: str | Path | None,
        patience: float,
        options: dict[str, Any],
    ) -> None:
        """Raise ValueError where the arguments name more than one place, or half of one."""
        check_places(base_url, redis_url, file_store, options)
        self._base_url, self._api_key, self._patience = base_url, api_key or "none", patience
        self._own = base_url is None and redis_url is None
        self._model = None if self._own or model is None else str(model)
        self._server: LocalServer | None = None
        if base_url is None:
            flags = {**({"model": model} if self._own and model is not None else {}), **options}
            self._server = LocalServer(redis_url, None if file_store is None else str(file_store), flags)
        self._calls: ServerCalls | None = None
        self._loading = asyncio.Lock()  # held while a live call waits for the model
        self._is_loaded = not self._own
        self._watch: asyncio.Task[None] | None = None
        self.at_close: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        self._creating: set[asyncio.Task[BatchState]] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start the processes, and wait until they take batches. Raise `ServerFailed`."""
        try:
            if self._server is not None:
                self._server.start()
            uds = "" if self._server is None else self._server.uds
            self._calls = ServerCalls(self.base_url, self._api_key, uds, self._wait_for_model)
            if self._server is not None:
                await self._server.wait_until_listening()
                self._watch = asyncio.create_task(self._keep_running(self._server))
            if self._own:
                await self._wait_until(self._takes_batches)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Run the coroutines of `at_close`, and end the processes that were started."""
        try:
            for work in list(self.at_close):
                self.in_background(work())
            for creating in self._creating:
                self.in_background(self._cancel_created(creating))
            if self._background:
                await asyncio.wait(self._background, timeout=_UNDO_SECONDS)
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            calls, self._calls = self._calls, None
            if calls is not None:
                await calls.close()
        finally:
            if self._server is not None:
                await self._server.stop()

    @property
    def base_url(self) -> str:
        """The server's URL; below http://localhost for a Unix socket."""
        return f"{(self._base_url or 'http://localhost/v1').rstrip('/')}/"

    @property
    def calls(self) -> ServerCalls:
        """The calls of an open connection. Raise `ClientError`."""
        if self._calls is None:
            raise ClientError("the client is not open: use it in `async with AsyncPipeline(…) as p`")
        return self._calls

    async def model(self) -> str:
        """Return the model of requests that name none.

        Raise `ClientError` where there are several.
        """
        if self._model is None:
            models = decode_answer(await self.patiently(lambda: self.calls.get("/models")))
            names = [one["id"] for one in models["data"]]
            if self._own:
                names = _shortest(names)
            if len(names) != 1:
                raise ClientError(f"the server has {len(names)} models ({', '.join(names)}): name one with model=…")
            self._model = names[0]
        return self._model

    async def line_options(self, endpoint: str | None, model: str | None, parameters: dict[str, Any]) -> LineOptions:
        """Return the defaults of lines."""
        return LineOptions(model or await self.model(), endpoint, parameters)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the server is unavailable or still processes the same call."""
        deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            self.check_server()
            try:
                return await call()
            except Exception as error:
                in_use = getattr(error, "code", None) == "idempotency_key_in_use"
                if not (in_use or is_passing(error)) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def create_batch(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> BatchState:
        """Create a batch. Cancel it if the caller is cancelled before it gets the id."""
        creating = asyncio.create_task(self._create(body, headers))
        self._creating.add(creating)
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            self.in_background(self._cancel_created(creating))
            raise
        finally:
            self._creating.discard(creating)

    async def _create(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> BatchState:
        content = encoded(body)
        return state_of(await self.patiently(lambda: self.calls.post("/batches", content, headers=headers)))

    async def _cancel_created(self, creating: "asyncio.Task[BatchState]") -> None:
        await self.cancel((await creating).id)

    async def cancel(self, batch_id: str) -> "httpx2.Response":
        """Cancel a batch, and return the answer."""
        return await self.calls.post(f"{path_of(batch_id)}/cancel")

    async def cancel_batches(self, batch_ids: Iterable[str]) -> None:
        """Cancel unfinished batches, even if the caller is cancelled meanwhile."""
        if cancelling := [self.in_background(self.cancel(one)) for one in batch_ids]:
            await asyncio.wait(cancelling)

    def in_background(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run a coroutine in the background; `close` waits some seconds for it."""

        async def quietly() -> None:
            with contextlib.suppress(Exception):
                await work

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def check_server(self) -> None:
        """Raise `ServerFailed` if the processes that were started have ended for good."""
        if self._watch is not None and self._watch.done() and not self._watch.cancelled():
            self._watch.result()

    async def deadline_of(self, timeout: float | None) -> float | None:
        """Return the deadline; the time counts from when a private server has loaded its model."""
        if timeout is None:
            return None
        await self.until_loaded()
        return time.monotonic() + timeout

    async def until_loaded(self) -> None:
        """Wait until a private server can answer live calls. Raise `ServerFailed`."""
        async with self._loading:
            if not self._is_loaded:
                await self._wait_until(self._is_ready)
                self._is_loaded = True

    async def _wait_for_model(self, request: Any) -> None:
        """Delay a request that needs a loaded model until the model is loaded."""
        if request.method == "POST" and not request.url.path.startswith(_NEED_NO_MODEL):
            await self.until_loaded()

    async def _keep_running(self, server: LocalServer) -> None:
        while True:
            server.check()
            await asyncio.sleep(_CHECK_SECONDS)

    async def _wait_until(self, passes: Callable[[], Awaitable[bool]]) -> None:
        """Wait until a private server passes the check. Raise `ServerFailed`."""
        answered, pause = time.monotonic(), FIRST_PAUSE
        while True:
            self.check_server()
            try:
                if await passes():
                    return
                answered = time.monotonic()
            except Exception as error:
                if not is_passing(error):
                    raise
                if time.monotonic() - answered > self._patience:
                    raise ServerFailed(f"the server does not answer: {error}") from None
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_READY_PAUSE)

    async def _takes_batches(self) -> bool:
        """Return whether batches may name the model: a worker is loading or has loaded it."""
        health = await self.calls.probe("/health")
        # A model that is loaded on demand is accepted without a worker
        return health is not None and (bool(health["workers"]) or await self._is_ready())

    async def _is_ready(self) -> bool:
        return await self.calls.probe("/ready") is not None


def check_places(
    base_url: str | None, redis_url: str | None, file_store: str | Path | None, options: dict[str, Any]
) -> None:
    """Raise ValueError where the arguments name more than one place, or half of one."""
    if base_url is not None and (redis_url or file_store or options):
        other = next(iter(options), "redis_url" if redis_url else "file_store")
        raise ValueError(f"'{other}' configures processes that the client starts, so it cannot be used with base_url")
    if given := [name for name in options if name in ("host", "port", "uds") or name.startswith("ssl_")]:
        raise ValueError(f"'{given[0]}' cannot be given: processes that the client starts serve this client only")
    if (redis_url is None) != (file_store is None):
        raise ValueError("a fleet needs both redis_url and file_store, with the file store that its processes use")


def _shortest(names: Sequence[str]) -> list[str]:
    """Return model names without folder paths whose short name is listed too."""
    return [one for one in names if (short := Path(one).resolve().name) == one or short not in names]
