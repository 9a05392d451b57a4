"""The ASGI app: `create_app(settings)`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI

from api import auth
from api.fleet import Fleet
from api.http.access_log import AccessLog
from api.http.cors import with_cors
from api.http.errors import Stoppable, install_error_handlers
from api.http.framing import Framing
from api.http.head import HeadAsGet
from api.http.held_shares import ReturnShares
from api.http.lingering import Lingering
from api.http.openapi import describe
from api.http.own_middleware import add_middleware
from api.http.request_ids import RequestIds
from api.reader import Reader
from api.routes import (
    batch_requests,
    batch_stream,
    batches,
    files,
    health,
    live_calls,
    metrics,
    models,
    pooling,
    server,
    streams,
    tokenization,
    uploads,
)
from api.settings import ApiSettings
from api.state import ApiState
from api.tracing import Traced
from api.web_pages import WebPages
from jobs.batch.retention import forget_output
from jobs.queue.connection import connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import KeyRing
from jobs.store.file_store import FileStore
from jobs.tracing import start_tracing

_MOST_FOLLOWERS = 4096  # clients that follow streams at once; each takes a connection to Redis


def create_app(settings: ApiSettings) -> FastAPI:
    """Return an app whose queue is at `settings.redis_url`; it connects when it starts.

    Raises `StoreError` for a file store that is no folder, and `SettingsError`.
    """
    ring = KeyRing(settings.file_store)
    tracing = start_tracing(settings.otlp_traces_endpoint, "pipeline-api")

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert settings.redis_url is not None
        client, reader_client = connect(settings.redis_url), connect_async(settings.redis_url)
        # Not the reader's: however many clients follow streams, live calls get their answers
        stream_client = connect_async(settings.redis_url, connections=_MOST_FOLLOWERS)
        queue = Queue(client, settings)
        fleet = Fleet(queue, settings.expected_models, settings.load_timeout)
        reader = Reader(reader_client, queue, fleet.short_retry_queue)
        store = FileStore(queue, settings.file_store, forget_output)
        app.state.pipeline = ApiState(settings, queue, stream_client, reader, fleet, store, ring)
        reading = asyncio.create_task(reader.run())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await reader_client.aclose()
            await stream_client.aclose()
            fleet.close()
            queue.close()
            client.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Batch inference pipeline",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.root_path = settings.root_path
    _add_middleware(app, ring, settings)
    if tracing is not None:
        app.add_middleware(Traced, tracing)
    install_error_handlers(app, settings)
    batch_modules = (batches, batch_requests, batch_stream)
    for module in (live_calls, pooling, tokenization, streams, models, files, uploads, *batch_modules, server):
        app.include_router(module.router, dependencies=[Depends(auth.authorize)], responses=auth.ANSWERS)
    for router in (health.router, metrics.router, server.open_router):
        app.include_router(router)
    describe(app, settings.completion_windows)
    return app


def _add_middleware(app: FastAPI, ring: KeyRing, settings: ApiSettings) -> None:
    """Put middleware around the routes, the last one outermost. Raise `SettingsError`."""
    app.add_middleware(WebPages, ring, settings)
    for middleware in (HeadAsGet, Lingering, Stoppable, Framing, ReturnShares):
        app.add_middleware(middleware)
    add_middleware(app, settings.middleware)
    app.add_middleware(with_cors, settings)
    if not settings.disable_uvicorn_access_log:
        app.add_middleware(AccessLog, settings.unlogged_paths)
    app.add_middleware(RequestIds)
