"""JSON responses of routes and errors."""

from typing import Any

from starlette.responses import Response

from jobs.protocol.results import encode_json


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response whose body is strict UTF-8, whatever `value` contains."""
    return Response(encode_json(value), status, headers, "application/json")
