"""The OpenAPI document at `/openapi.json`, with the error shape that routes do not declare."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.answer_objects import ANSWERS
from jobs.protocol.endpoints import ALL_ENDPOINTS
from jobs.protocol.validation import body_schema

_BATCHES = "/v1/batches"
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
        }
    },
}
_REFERENCE = "#/components/schemas/{name}"
_FAILURE = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}

EVENTS: dict[str, Any] = {"text/event-stream": {}}
"""The content of a response that streams."""


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `openapi_extra` of a route that reads its JSON body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answered(kind: Any, **others: Any) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route that answers with one of `ANSWERS` or other content types."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return {200: {"content": {"application/json": {"schema": schema}, **others}}}


def query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return one of the `parameters` of a route that reads its query itself."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def describe(app: FastAPI, completion_windows: tuple[str, ...]) -> None:
    """Replace the app's document.

    FastAPI's own lists a 422 that no client ever gets, and has neither the optional key nor the
    completion windows of this server.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, completion_windows)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, completion_windows: tuple[str, ...]) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = msgspec.json.schema_components(ANSWERS, ref_template=_REFERENCE)
    found["components"]["schemas"] = {**schemas, "Error": _ERROR}
    _set_bodies(found["paths"], completion_windows)
    for path in found["paths"].values():
        for operation in path.values():
            if "security" in operation:
                operation["security"].append({})
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = {"description": "Any failure."}
            for status, response in responses.items():
                if status == "default" or int(status) >= 400:
                    response.setdefault("content", _FAILURE)
    return found


def _set_bodies(paths: dict[str, Any], completion_windows: tuple[str, ...]) -> None:
    """Set the bodies that routes cannot declare.

    FastAPI turns bounds into floats, and 2**63 - 1 is no float.
    """
    urls = (*ALL_ENDPOINTS, _BATCHES)
    bodies = {path: paths[path]["post"]["requestBody"]["content"]["application/json"] for path in urls}
    for url in ALL_ENDPOINTS:
        bodies[url]["schema"] = body_schema(url)
    bodies[_BATCHES]["schema"]["properties"]["completion_window"]["enum"] = list(completion_windows)
