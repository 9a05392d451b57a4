"""`/v1/files`: upload, list, retrieve, read, delete."""

import errno
import logging
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import anyio
import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.answer_objects import FileDeleted, FileObject, PageOf
from api.auth import caller_of
from api.file_objects import file_object
from api.forms import receive
from api.http.errors import error_response
from api.http.openapi import answered, query
from api.http.pages import PERIOD, envelope, not_after, query_choice, query_integer, query_period
from api.http.responses import json_response
from api.idempotency import PARAMETER, answers, respond
from api.state import BlockingRoute, queue_reachable, state_of
from api.uploads import ANCHOR, EXPIRY, EXPIRY_SCHEMA, SECONDS, FileForm
from jobs.batch.completion_log import read_log
from jobs.batch.manifest import Manifest, load_manifest
from jobs.protocol import fields
from jobs.protocol.fields import INT32
from jobs.protocol.results import ApiError
from jobs.protocol.states import END_STATES
from jobs.store.file_store import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, PURPOSES, FileRecord, FileStore
from jobs.store.storage import StoreError, is_local, named, open_input, stamp_of

_MAX_LIMIT = 10_000

logger = logging.getLogger(__name__)

router = APIRouter(route_class=BlockingRoute)
_IN_QUEUE = [Depends(queue_reachable)]  # these routes ask the queue; reading a file asks the disk alone

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
                    EXPIRY: EXPIRY_SCHEMA,
                    ANCHOR: {"type": "string", "enum": ["created_at"]},
                    SECONDS: {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS},
                },
            }
        }
    },
}
_LIST = [
    query("after", "a file's id; the page begins behind it", {"type": "string", "pattern": "^file-[0-9a-f]{24}$"}),
    query(
        "limit", "files of one page", {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": _MAX_LIMIT}
    ),
    query("order", "by creation", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    query("purpose", "only files of this one", {"type": "string"}),
    *PERIOD,
]
_EXTENT = [
    query(
        "offset",
        "lines of a batch's output to pass over",
        {"type": "integer", "minimum": 0, "maximum": INT32, "default": 0},
    ),
    query("limit", "lines of a batch's output", {"type": "integer", "minimum": 1, "maximum": INT32}),
]
_ANY_BYTES = "application/octet-stream"
_CONTENT = {_ANY_BYTES: {"schema": {"type": "string", "format": "binary"}}}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, or lines of it",
        "content": _CONTENT,
        "headers": {
            "Content-Disposition": {"description": "its name", "schema": {"type": "string"}},
            "X-Last-Line": {
                "description": "where lines were asked for, the offset to go on from",
                "schema": {"type": "integer"},
            },
            "X-Incomplete": {
                "description": "with X-Last-Line: whether there is or will be more",
                "schema": {"enum": ["true", "false"]},
            },
        },
    },
    206: {"description": "What `Range` asked for", "content": {**_CONTENT, "multipart/byteranges": {}}},
    416: {"description": "A `Range` beyond the end"},
}


@router.post(
    "/v1/files",
    responses=answers(FileObject),
    openapi_extra={"requestBody": _FORM, "parameters": [PARAMETER]},
    dependencies=_IN_QUEUE,
)
async def upload_file(request: Request) -> Response:
    """Store a file; its parts may come in any order."""
    return respond(await receive(request, FileForm(request, _tenant(request))))


@router.get(
    "/v1/files",
    responses=answered(PageOf[FileObject]),
    openapi_extra={"parameters": _LIST},
    dependencies=_IN_QUEUE,
)
def list_files(request: Request) -> Response:
    """Return a page of the caller's files."""
    after = request.query_params.get("after") or None
    limit = query_integer(request, "limit", 1, _MAX_LIMIT) or _MAX_LIMIT
    order = cast(Literal["asc", "desc"], query_choice(request, "order", ("asc", "desc")) or "desc")
    purpose = request.query_params.get("purpose") or None
    created = query_period(request)
    try:
        page = _files(request).list(
            _tenant(request), after=after, limit=limit, order=order, purpose=purpose, created=created
        )
    except KeyError:
        raise not_after(after or "") from None
    return json_response(envelope([file_object(record) for record in page.items], page.has_more))


@router.get("/v1/files/{file_id}", responses=answered(FileObject))
def retrieve_file(request: Request, file_id: str) -> Response:
    """Return a file; while a batch still writes it, with the size that can be read."""
    record = _found(request, file_id)
    if not record.complete and (manifest := _manifest(_files(request), record)) is not None:
        record = msgspec.structs.replace(record, bytes=manifest.logged_bytes)
    return json_response(file_object(record))


@router.delete("/v1/files/{file_id}", responses=answered(FileDeleted), dependencies=_IN_QUEUE)
def delete_file(request: Request, file_id: str) -> Response:
    """Remove a file. Batches that read it go on with their own copy."""
    record = _found(request, file_id)
    manifest = _manifest(_files(request), record)
    # An unfinished batch would write the file again
    if not record.complete or (manifest is not None and manifest.state not in END_STATES):
        message = f"The batch {record.batch_id} is still writing the file {file_id}; cancel that first."
        raise ApiError(409, message, param="id")
    try:
        _files(request).delete(record.tenant, file_id)
    except KeyError:
        raise _unknown(file_id) from None
    return json_response(FileDeleted(id=file_id, object="file", deleted=True).as_dict())


@router.get(
    "/v1/files/{file_id}/content", responses=_BYTES, response_class=Response, openapi_extra={"parameters": _EXTENT}
)
def read_file(request: Request, file_id: str) -> Response:
    """Return the bytes of a file.

    The output file of a batch can be read before the batch ends. Then, and whenever `offset` or
    `limit` is given, its lines come in the order in which they were finished. `X-Last-Line` is the
    offset to go on from, `X-Incomplete` says whether there is or will be more.
    """
    record = _found(request, file_id)
    offset, limit = query_integer(request, "offset", 0, INT32), query_integer(request, "limit", 1, INT32)
    try:
        if record.complete and offset is None and limit is None:
            return _whole(str(_files(request).content_path(record)), record)
        return _by_lines(_files(request), record, offset or 0, limit)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # deleted a moment ago
            _files(request).check()
            raise _unknown(file_id) from None
        raise


def _whole(path: str, record: FileRecord) -> Response:
    with named("cannot read", path):
        status = os.stat(path) if is_local(path) else _status_of(path)
    return _StoredFile(path, media_type=_ANY_BYTES, filename=record.filename, stat_result=status)


def _status_of(location: str) -> os.stat_result:
    """Return the status of a file in a bucket as a file system has it."""
    stamp = stamp_of(location)
    if stamp is None:
        raise FileNotFoundError(errno.ENOENT, "it is gone")
    size, changed = stamp[0], stamp[1] // 10**9
    return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, changed, changed, changed))


def _by_lines(files: FileStore, record: FileRecord, offset: int, limit: int | None) -> Response:
    manifest = _manifest(files, record)
    if manifest is None and record.batch_id is not None:
        files.check()
        if record.complete:
            message = "This file is no longer read by lines, since its batch was deleted: read all of it."
            fields.fail(message, "limit" if limit is not None else "offset", "invalid_value")
        raise _unknown(record.id)
    if manifest is None or manifest.spec.output_file_id != record.id:
        fields.fail(
            "Only the output file of a batch is read by lines.",
            "limit" if limit is not None else "offset",
            "invalid_value",
        )
    lines, last = read_log(manifest.spec.root, manifest.logged, offset, limit)
    more = not record.complete or last < manifest.logged_lines
    headers = {
        "x-incomplete": "true" if more else "false",
        "x-last-line": str(last),
        "content-disposition": f'attachment; filename="{record.batch_id}_output.jsonl"',
    }
    return _StoredLines(lines, 200, headers, _ANY_BYTES)


def _manifest(files: FileStore, record: FileRecord) -> Manifest | None:
    """Return the manifest of the batch that wrote a file, if any. Raises `StoreError`."""
    return None if record.batch_id is None else load_manifest(str(files.batch_root(record.batch_id)))


class _StoredFile(FileResponse):
    """A file, or a range of it.

    A range beyond its end is refused in OpenAI's shape, and an invalid one is ignored (RFC 9110).
    """

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[anyio.AsyncFile[bytes]]:
        if is_local(str(self.path)):
            async with super()._open_file() as file:
                yield file
            return
        async with anyio.wrap_file(await anyio.to_thread.run_sync(open_input, str(self.path))) as file:
            yield file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: int | None = None

        async def send_shaped(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refusal = message["status"]
                if refusal == 416:
                    error = ApiError(
                        416, "Invalid 'Range': it is not within the file.", param="Range", code="invalid_value"
                    )
                    headers = {"content-range": Headers(raw=message["headers"])["content-range"]}
                    await error_response(error, headers)(scope, receive, send)
            elif refusal is None:
                await send(message)

        await _answer(super().__call__, scope, receive, send_shaped)
        if refusal is not None and refusal != 416:
            rest = [header for header in scope["headers"] if header[0] != b"range"]
            await _answer(super().__call__, {**scope, "headers": rest}, receive, send)


class _StoredLines(StreamingResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _answer(super().__call__, scope, receive, send)


async def _answer(response: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response whose head waits for the first bytes of the store.

    If these cannot be read, the response is the error; if later ones cannot, it ends early.
    """
    heads: list[Message] = []
    is_begun = False

    async def send_late(message: Message) -> None:
        nonlocal is_begun
        if message["type"] == "http.response.start":
            heads.append(message)
            return
        while heads:
            is_begun = True
            await send(heads.pop())
        await send(message)

    try:
        await response(scope, receive, send_late)
    except StoreError as error:
        if not is_begun:
            raise
        logger.error("the answer to %s %s is cut off: %s", scope["method"], fields.shown(scope["path"]), error)


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
