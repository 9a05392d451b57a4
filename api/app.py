"""The ASGI app: `create_app(settings)`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI

from api import auth
from api.fleet import Fleet
from api.http.errors import Stoppable, install_error_handlers
from api.http.framing import Framing
from api.http.head import HeadAsGet
from api.http.lingering import Lingering
from api.http.openapi import describe
from api.http.request_ids import RequestIds
from api.reader import Reader
from api.routes import batch_stream, batches, files, health, live_calls, metrics, models, streams
from api.settings import ApiSettings
from api.state import ApiState
from api.web_pages import WebPages
from jobs.batch.retention import forget_output
from jobs.queue.connection import connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import KeyRing
from jobs.store.file_store import FileStore

_MOST_FOLLOWERS = 4096  # clients that follow streams at once; each takes a connection to Redis


def create_app(settings: ApiSettings) -> FastAPI:
    """An app whose queue is at `settings.redis_url`; connections are made when it starts.

    Raises `StoreError` for a file store that is no folder.
    """
    ring = KeyRing(settings.file_store)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert settings.redis_url is not None
        client, reader_client = connect(settings.redis_url), connect_async(settings.redis_url)
        # Not the reader's: however many clients follow streams, live calls get their answers
        stream_client = connect_async(settings.redis_url, connections=_MOST_FOLLOWERS)
        queue = Queue(client, settings)
        fleet = Fleet(queue, settings.expected_models)
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

    app = FastAPI(
        title="Batch inference pipeline", lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    app.add_middleware(WebPages, ring, settings)
    for middleware in (HeadAsGet, Lingering, Stoppable, Framing, RequestIds):  # the last one is outermost
        app.add_middleware(middleware)
    install_error_handlers(app)
    for module in (live_calls, streams, models, files, batches, batch_stream):
        app.include_router(module.router, dependencies=[Depends(auth.authorize)], responses=auth.ANSWERS)
    for module in (health, metrics):
        app.include_router(module.router)
    describe(app, settings.completion_windows)
    return app
