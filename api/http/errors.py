"""Errors in OpenAI's shape, `{"error": {message, type, param, code}}`, whatever raised them."""

import asyncio
import logging
from functools import partial
from http import HTTPStatus

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.answer_headers import own_headers
from api.http.cors import cors_headers
from api.http.responses import json_response
from api.http_settings import HttpSettings
from jobs.errors import JobsError
from jobs.protocol import fields
from jobs.protocol.results import ApiError, ErrorType
from jobs.queue.scripts import QueueFull, QueueUnavailable
from jobs.store.api_keys import KeysUnreadable
from jobs.store.marker import StoreAway
from jobs.store.storage import StoreError, StoreFull

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


class MayExist(QueueUnavailable):
    """The queue or a bucket went out of reach while a call created something, which may exist.

    Clients that try again by themselves would create a second one.
    """

    retry = False


# Code and message; the class has the status, and whether to retry
_ANSWERS: dict[type, tuple[str, str]] = {
    QueueUnavailable: ("queue_unavailable", "The queue is out of reach at the moment; try again."),
    MayExist: (
        "queue_unavailable",
        "The queue or the file store went out of reach during the call, so its result may exist: look for it in a"
        " minute, before you try again.",
    ),
    QueueFull: ("queue_unavailable", "The queue has no room for more at the moment; try again."),
    StoreError: ("file_store_unavailable", "The file store cannot be used at the moment."),
    StoreAway: (
        "file_store_unavailable",
        "The file store is not mounted at the moment, so nothing can be said of its files; try again.",
    ),
    StoreFull: ("insufficient_storage", "The file store has no room left; nothing was stored."),
    KeysUnreadable: ("keys_unavailable", "API keys cannot be checked at the moment; try again."),
}

# By status of an `ApiError`. Workers load for seconds, and clients try only twice again
_NOT_AGAIN = {"x-should-retry": "false"}  # clients would repeat the call otherwise
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    409: _NOT_AGAIN,
    503: {"retry-after": "5"},
    507: _NOT_AGAIN,
}
# Codes of a 409 that ends by itself
_PASSING = frozenset({"idempotency_key_in_use", "upload_busy"})

logger = logging.getLogger(__name__)


class Stoppable:
    """Answer calls that a stopping server cancels with an error, as plain ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if started:  # otherwise the server logs the cancellation with its traceback
                logger.warning("an answer to %s is cut off: the server is being stopped", _shown_path(scope))
                return
            stopping = ApiError(503, "The server is being stopped; try again.", "server_error", code="server_stopping")
            await error_response(stopping, {"retry-after": "1"})(scope, receive, send)


def install_error_handlers(app: FastAPI, settings: HttpSettings) -> None:
    """Make the app answer every failure in OpenAI's shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid)
    for kind in (redis.RedisError, *_ANSWERS):
        app.add_exception_handler(kind, _unavailable)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, partial(_unforeseen, settings))


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Return the response that carries an error."""
    return json_response(error.body(), error.status, headers)


def answer_to(error: Exception) -> ApiError:
    """Return the error of a call that failed for the queue or the file store."""
    known = error if isinstance(error, JobsError) else QueueUnavailable()
    code, message = next(_ANSWERS[kind] for kind in type(known).__mro__ if kind in _ANSWERS)
    return ApiError(known.status, message, "server_error", code=code)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    usual = None if error.code in _PASSING else _HEADERS.get(error.status)
    return error_response(error, _NOT_AGAIN if error.final else usual)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    call = _shown_call(request)
    if error.status_code == 404:
        return error_response(ApiError(404, f"Unknown request URL: {call}.", code="unknown_url"))
    if error.status_code == 405:
        return error_response(
            ApiError(405, f"Not allowed to {call}.", code="method_not_allowed"), {"allow": _allowed(request)}
        )
    kind: ErrorType = "server_error" if error.status_code >= 500 else "invalid_request_error"
    message = str(error.detail) or HTTPStatus(error.status_code).phrase
    return error_response(ApiError(error.status_code, message, kind), dict(error.headers or {}))


def _shown_call(request: Request) -> str:
    """Return method and path for a message; they may be long and hold control characters."""
    return _shown_path(request.scope)


def _shown_path(scope: Scope) -> str:
    return fields.shown(f"{scope['method']} {scope['path']}")


def _allowed(request: Request) -> str:
    """Return the methods of a path. The framework names those of the first route alone."""
    scopes = {method: {**request.scope, "method": "GET" if method == "HEAD" else method} for method in _METHODS}
    found = [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join(found)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(ApiError(400, f"{param or 'request'}: {first['msg']}", param=param, code="invalid_value"))


async def _unavailable(_request: Request, error: Exception) -> Response:
    answer = answer_to(error)
    level = logging.ERROR if isinstance(error, StoreError) else logging.WARNING
    logger.log(level, "answering %d %s: %s", answer.status, answer.code, error)
    retry = getattr(error, "retry", True)
    return error_response(answer, {"retry-after": "1"} if retry else _NOT_AGAIN)


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # no client reads it


async def _unforeseen(settings: HttpSettings, request: Request, _error: Exception) -> Response:
    """Answer an unforeseen error, outside of all middleware, whose headers are added here.

    The server logs the traceback and closes the connection.
    """
    request_id = request.state.request_id
    logger.error("request %s failed: %s", request_id, _shown_call(request))
    failure = ApiError(500, "The server had an error while handling the request.", "server_error")
    headers = {"connection": "close", **dict(cors_headers(settings, request.headers.get("origin", "")))}
    answer = error_response(failure, headers)
    answer.raw_headers += own_headers(request.scope["state"])
    return answer
