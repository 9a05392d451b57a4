"""CORS: the answers that web pages of other origins may read.

Answers that are given without asking the app have the headers too, so that a page can show the
error.
"""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from api.http_settings import ANY, HttpSettings

_EXPOSED = (
    "idempotent-replayed",
    "openai-processing-ms",
    "openai-version",
    "retry-after",
    "retry-after-ms",
    "x-incomplete",
    "x-last-line",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
    "x-should-retry",
    "x-stream-id",
)
"""Headers that pages of allowed origins may read."""


def with_cors(app: ASGIApp, settings: HttpSettings) -> ASGIApp:
    """Wrap the app so that pages of the allowed origins may call it and read its answers."""
    if not settings.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=_EXPOSED,
    )


def cors_headers(settings: HttpSettings, origin: str) -> list[tuple[str, str]]:
    """Return the CORS headers of an answer to `origin` that does not pass through `with_cors`.

    An unknown origin is "".
    """
    anyone = ANY in settings.allowed_origins
    if not anyone and origin not in settings.allowed_origins:
        return []
    headers = [
        ("access-control-allow-origin", ANY if anyone else origin),
        ("access-control-expose-headers", ", ".join(_EXPOSED)),
        ("vary", "Origin"),
    ]
    return [*headers, ("access-control-allow-credentials", "true")] if settings.allow_credentials else headers
