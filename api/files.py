"""`/v1/files`: upload, list, look at, read, delete."""

import os
from typing import Any, Literal, cast

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from openai.types import FileDeleted, FileObject
from starlette.types import Message, Receive, Scope, Send

from api.auth import caller_of
from api.errors import error_response
from api.openapi import query
from api.pages import PageOf, envelope, not_after, query_choice, query_integer
from api.state import state_of
from api.uploads import ANCHOR, SECONDS, receive_file
from jobs import fields
from jobs.file_store import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, PURPOSES, FileRecord, FileStore
from jobs.results import ApiError, encode_json

_MAX_LIMIT = 10_000

router = APIRouter()

_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                    ANCHOR: {"type": "string", "enum": ["created_at"]},
                    SECONDS: {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS},
                },
            }
        }
    },
}
_LIST = [
    query("after", "a file's id; the page begins behind it", {"type": "string"}),
    query("limit", "files of one page", {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": _MAX_LIMIT}),
    query("order", "by creation", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    query("purpose", "only files of this one", {"type": "string"}),
]


@router.post("/v1/files", responses={200: {"model": FileObject}}, openapi_extra={"requestBody": _FORM})
async def upload_file(request: Request) -> Response:
    """Stores a file; its parts may come in any order."""
    state = state_of(request)
    return _json(_as_openai(await receive_file(request, state.files, state.settings, _tenant(request))))


@router.get("/v1/files", responses={200: {"model": PageOf[FileObject]}}, openapi_extra={"parameters": _LIST})
def list_files(request: Request) -> Response:
    """A page of the caller's files."""
    after = request.query_params.get("after") or None
    limit = query_integer(request, "limit", 1, _MAX_LIMIT) or _MAX_LIMIT
    order = cast(Literal["asc", "desc"], query_choice(request, "order", ("asc", "desc")) or "desc")
    purpose = request.query_params.get("purpose") or None
    try:
        page = _files(request).list(_tenant(request), after=after, limit=limit, order=order, purpose=purpose)
    except KeyError:
        raise not_after(after or "") from None
    return _json(envelope([_as_openai(record) for record in page.items], page.has_more))


@router.get("/v1/files/{file_id}", responses={200: {"model": FileObject}})
def retrieve_file(request: Request, file_id: str) -> Response:
    """What a file is."""
    return _json(_as_openai(_found(request, file_id)))


@router.delete("/v1/files/{file_id}", responses={200: {"model": FileDeleted}})
def delete_file(request: Request, file_id: str) -> Response:
    """Removes a file. Batches that read it go on: they have their own."""
    record = _found(request, file_id)
    if not record.complete:
        message = f"The batch {record.batch_id} is still writing the file {file_id}; cancel that first."
        return error_response(ApiError(409, message, param="id"), {"x-should-retry": "false"})
    try:
        _files(request).delete(record.tenant, file_id)
    except KeyError:
        raise _unknown(file_id) from None
    return _json(FileDeleted(id=file_id, object="file", deleted=True).model_dump())


_BYTES = {"description": "The file", "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/v1/files/{file_id}/content", responses={200: _BYTES}, response_class=Response)
def read_file(request: Request, file_id: str) -> Response:
    """The bytes of a file."""
    record = _found(request, file_id)
    path = _files(request).content_path(record)
    try:
        return _StoredFile(path, media_type="application/octet-stream", filename=record.filename, stat_result=os.stat(path))
    except FileNotFoundError:  # deleted a moment ago
        raise _unknown(file_id) from None


class _StoredFile(FileResponse):
    """A file, or a range of it; what is wrong with the range is said in OpenAI's shape."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = False

        async def send_shaped(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = True
                error = ApiError(message["status"], "Invalid 'Range': it is not within the file.", param="Range", code="invalid_value")
                await error_response(error)(scope, receive, send)
            elif not refused:
                await send(message)

        await super().__call__(scope, receive, send_shaped)


def _as_openai(record: FileRecord) -> dict[str, Any]:
    # Not validated: "evals" is a purpose of uploads that the package's type does not list.
    shaped = FileObject.model_construct(
        id=record.id, bytes=record.bytes, created_at=record.created_at, filename=record.filename, object="file",
        purpose=record.purpose, status="processed", expires_at=record.expires_at, status_details=None,
    )  # fmt: skip
    return shaped.model_dump(warnings=False)


def _found(request: Request, file_id: str) -> FileRecord:
    try:
        return _files(request).get(_tenant(request), file_id)
    except KeyError:
        raise _unknown(file_id) from None


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {fields.shown(file_id)}", param="id")


def _files(request: Request) -> FileStore:
    return state_of(request).files


def _tenant(request: Request) -> str:
    return caller_of(request).tenant


def _json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")
