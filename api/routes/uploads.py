"""`/v1/uploads`: files in parts, which are sent in any order and joined."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.answer_objects import UploadObject, UploadPart
from api.auth import caller_of
from api.file_objects import upload_object
from api.forms import MultipartForm, on_disk, receive
from api.http.multipart import FormPart
from api.http.openapi import answered, json_body
from api.http.request_body import read_body
from api.http.responses import json_response
from api.idempotency import PARAMETER, Answer, answers, make_once, respond
from api.state import queue_reachable, state_of
from api.threads import JOINS, run_in
from api.uploads import EXPIRY_SCHEMA, base_name, check_content, check_purpose, most_bytes, read_expiry
from jobs.protocol import fields
from jobs.protocol.ids import PART, UPLOAD, micros_of
from jobs.protocol.results import ApiError
from jobs.protocol.validation import decode_body
from jobs.protocol.value_types import or_null
from jobs.store.file_store import PURPOSES
from jobs.store.upload_store import MOST_PARTS, PART_BYTES, PartWriter, UploadRecord

_MAX_BODY = 1024 * 1024  # bytes
_MAX_TYPE = 255
_MD5 = re.compile("[0-9a-fA-F]{32}")

_NEW = json_body(
    {
        "type": "object",
        "required": ["bytes", "filename", "mime_type", "purpose"],
        "properties": {
            "bytes": {"type": "integer", "minimum": 1},
            "filename": {"type": "string", "minLength": 1},
            "mime_type": {"type": "string", "maxLength": _MAX_TYPE},
            "purpose": {"type": "string", "enum": list(PURPOSES)},
            "expires_after": or_null(EXPIRY_SCHEMA),
        },
    }
)
_PART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {"data": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_COMPLETION = json_body(
    {
        "type": "object",
        "required": ["part_ids"],
        "properties": {
            "part_ids": {"type": "array", "minItems": 1, "maxItems": MOST_PARTS, "items": {"type": "string"}},
            "md5": or_null({"type": "string", "pattern": f"^{_MD5.pattern}$"}),
        },
    }
)

router = APIRouter(dependencies=[Depends(queue_reachable)])


@router.post("/v1/uploads", responses=answers(UploadObject), openapi_extra={**_NEW, "parameters": [PARAMETER]})
async def create_upload(request: Request) -> Response:
    """Begin an upload, which can be completed within an hour."""
    raw = await read_body(request, _MAX_BODY)
    return respond(await state_of(request).fleet.unless_away(on_disk(_create, request, raw)))


@router.post("/v1/uploads/{upload_id}/parts", responses=answered(UploadPart), openapi_extra=_PART)
async def add_part(request: Request, upload_id: str) -> Response:
    """Store a part of an upload; parts may be sent side by side."""
    return json_response(await receive(request, _PartForm(request, upload_id)))


@router.post("/v1/uploads/{upload_id}/complete", responses=answered(UploadObject), openapi_extra=_COMPLETION)
async def complete_upload(request: Request, upload_id: str) -> Response:
    """Join an upload's parts to a file, in the order of `part_ids`; the call may be repeated."""
    return await _answer(request, _complete(request, upload_id, await read_body(request, _MAX_BODY)))


@router.post("/v1/uploads/{upload_id}/cancel", responses=answered(UploadObject))
async def cancel_upload(request: Request, upload_id: str) -> Response:
    """End an upload and remove its parts."""
    return await _answer(request, on_disk(state_of(request).uploads.cancel, caller_of(request).tenant, upload_id))


def _create(request: Request, raw: bytes) -> Answer:
    body = fields.mapping(decode_body(raw), "body")
    purpose = fields.text(fields.required(body, "purpose"), "purpose")
    filename = base_name(fields.text(fields.required(body, "filename"), "filename"), "filename")
    check_purpose(purpose, filename)
    size = fields.integer(fields.required(body, "bytes"), "bytes", 1, 2**63 - 1)
    state, tenant = state_of(request), caller_of(request).tenant
    limit = most_bytes(state.settings, purpose)
    if size > limit:
        message = f"The file is too large: files may have up to {limit} bytes."
        raise ApiError(413, message, param="bytes", code="request_too_large")
    fields.text(fields.required(body, "mime_type"), "mime_type", _MAX_TYPE)
    expires_seconds = fields.optional(body, "expires_after", read_expiry, None)

    def find(upload_id: str) -> dict[str, Any] | None:
        record = state.uploads.find(tenant, upload_id)
        return None if record is None else upload_object(record)

    def make(upload_id: str | None) -> dict[str, Any]:
        record = state.uploads.create(
            filename=filename,
            purpose=purpose,
            size=size,
            tenant=tenant,
            file_expires_seconds=expires_seconds,
            upload_id=upload_id,
        )
        return upload_object(record)

    return make_once(request, UPLOAD, body, find, make)


async def _complete(request: Request, upload_id: str, raw: bytes) -> UploadRecord:
    part_ids, md5 = await on_disk(_read_completion, raw)
    tenant, uploads = caller_of(request).tenant, state_of(request).uploads
    return await run_in(JOINS, uploads.complete, tenant, upload_id, part_ids, check_content, md5)


def _read_completion(raw: bytes) -> tuple[list[str], str | None]:
    """Return the ids of the parts, and the md5 of the content if it is given."""
    body = fields.mapping(decode_body(raw), "body")
    given = fields.array(fields.required(body, "part_ids"), "part_ids", MOST_PARTS, least=1)
    part_ids = [fields.text(part_id, f"part_ids[{place}]") for place, part_id in enumerate(given)]
    return part_ids, fields.optional(body, "md5", _md5, None)


class _PartForm(MultipartForm[PartWriter, dict[str, Any]]):
    """The form of a part."""

    content, noun = "data", "part"

    def __init__(self, request: Request, upload_id: str) -> None:
        super().__init__(request)
        self._upload_id = upload_id

    def limit(self) -> int:
        """Return the most bytes of a part."""
        return PART_BYTES

    def opener(self, part: FormPart) -> Callable[[], PartWriter]:
        """Return the function that begins the part."""
        return partial(self.state.uploads.begin_part, caller_of(self.request).tenant, self._upload_id)

    async def commit(self) -> dict[str, Any]:
        """Commit the part and return its object."""
        if self.writer is None:
            fields.missing("data")
        if not self.size:
            fields.fail("Invalid 'data': the part is empty.", "data", "empty_file")
        self.check_size()
        await self.write()
        await on_disk(self.writer.commit)
        made = micros_of(PART, self.writer.id) // 1_000_000
        return UploadPart(id=self.writer.id, created_at=made, object="upload.part", upload_id=self._upload_id).as_dict()


async def _answer(request: Request, action: Awaitable[UploadRecord]) -> Response:
    record = await state_of(request).fleet.unless_away(action)
    return json_response(upload_object(record))


def _md5(value: Any, param: str) -> str:
    if not _MD5.fullmatch(fields.text(value, param)):
        fields.fail(f"Invalid '{param}': it is not 32 hexadecimal digits.", param, "invalid_value")
    return str(value)
