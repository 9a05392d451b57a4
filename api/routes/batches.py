"""`/v1/batches`: create, list, retrieve, cancel, retry, delete."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from api.answer_objects import Batch, BatchDeleted, PageOf
from api.auth import Caller, caller_of
from api.batch_objects import batch_object, find_batch
from api.http.errors import MayExist
from api.http.openapi import answered, json_body, query
from api.http.pages import PERIOD, envelope, not_after, query_choices, query_integer, query_period
from api.http.request_body import read_body
from api.http.responses import json_response
from api.idempotency import PARAMETER, Answer, answers, key_of, make_once, respond
from api.settings import ApiSettings
from api.state import ApiState, BlockingRoute, queue_reachable, state_of
from api.threads import COPIES, run_in
from api.uploads import EXPIRY_SCHEMA, read_expiry
from jobs.batch.client import BatchRecord, BatchRefused, cancel_batch, list_batches
from jobs.batch.deleted import refuse_deleted
from jobs.batch.forgetting import delete_batch
from jobs.batch.retry import retry_batch
from jobs.batch.submit import BatchSubmission, TooManyBatches, submit_batch, submitted_batch
from jobs.protocol import fields
from jobs.protocol.endpoints import BATCH_URLS
from jobs.protocol.ids import BATCH, is_id, new_id
from jobs.protocol.priority import MOST_PRIORITY
from jobs.protocol.results import ApiError
from jobs.protocol.states import STATES
from jobs.protocol.validation import decode_body
from jobs.protocol.value_types import or_null
from jobs.protocol.windows import window_seconds
from jobs.queue.scripts import QueueFull, QueueUnavailable

_MAX_BODY = 1024 * 1024  # bytes
_MAX_LIMIT, _USUAL_LIMIT = 100, 20
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_ID = 256
_STREAM = "stream"  # `input` of an open batch

_METADATA = {
    "type": ["object", "null"],
    "maxProperties": _MAX_PAIRS,
    "propertyNames": {"maxLength": _MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE},
}
_BODY = json_body(
    {
        "type": "object",
        "required": ["endpoint", "completion_window"],
        "oneOf": [{"required": ["input_file_id"]}, {"required": ["input"]}],
        "properties": {
            "input_file_id": {"type": "string", "maxLength": _MAX_ID},
            "input": {"type": "string", "enum": [_STREAM]},
            "endpoint": {"type": "string", "enum": list(BATCH_URLS)},
            "completion_window": {"type": "string"},
            "metadata": _METADATA,
            "priority": or_null({"type": "integer", "minimum": -MOST_PRIORITY, "maximum": MOST_PRIORITY, "default": 0}),
            "output_expires_after": or_null(EXPIRY_SCHEMA),
        },
    }
)
_PAGE = [
    query("after", "a batch's id; the page begins behind it", {"type": "string"}),
    query(
        "limit",
        "batches of one page",
        {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": _USUAL_LIMIT},
    ),
    query(
        "status",
        "only batches with one of these",
        {"type": "array", "items": {"type": "string", "enum": list(STATES)}},
    ),
    *PERIOD,
]

_RETRY_PARAMETER = {
    **PARAMETER,
    "description": "another batch is made for each, and without one for all calls within 24 hours",
}

router = APIRouter(dependencies=[Depends(queue_reachable)], route_class=BlockingRoute)


@router.post("/v1/batches", responses=answers(Batch), openapi_extra={**_BODY, "parameters": [PARAMETER]})
async def create_batch(request: Request) -> Response:
    """Create a batch from an uploaded file, whose errors the batch reports once it is validated.

    With `"input": "stream"`, create an open batch, to which requests are appended.
    """
    raw = await read_body(request, _MAX_BODY)
    state = state_of(request)
    undecided = threading.Lock()  # its holder decides: the batch is made, or the call refused
    with _may_exist(undecided, key_of(request) is not None):
        creating = run_in_threadpool(_create, request, raw, undecided)
        return respond(await state.fleet.unless_away(creating))


@router.get("/v1/batches", responses=answered(PageOf[Batch]), openapi_extra={"parameters": _PAGE})
def list_page(request: Request) -> Response:
    """Return a page of the caller's batches, newest first.

    It may be shorter than `limit` while `has_more` is true; the next one begins behind `last_id`.
    """
    after = request.query_params.get("after") or None
    if after is not None and not is_id(BATCH, after):
        raise not_after(after)
    limit = query_integer(request, "limit", 1, _MAX_LIMIT) or _USUAL_LIMIT
    states, created = query_choices(request, "status", tuple(STATES)), query_period(request)
    page = list_batches(state_of(request).queue, caller_of(request).tenant, after, limit, states, created)
    return json_response(envelope([batch_object(record) for record in page.items], page.has_more, page.last))


@router.get("/v1/batches/{batch_id}", responses=answered(Batch))
def retrieve_batch(request: Request, batch_id: str) -> Response:
    """Return a batch."""
    return json_response(batch_object(_find(request, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", responses=answered(Batch))
def cancel(request: Request, batch_id: str) -> Response:
    """End a batch early.

    Finished lines stay, running ones are stopped; every other line gets an error line, unless the
    file is still being validated.
    """
    _find(request, batch_id)
    try:
        record = cancel_batch(state_of(request).queue.redis, batch_id)
    except KeyError:
        record = _find(request, batch_id)
    if record.state not in ("cancelling", "cancelled"):
        raise _too_late(record)
    return json_response(batch_object(record))


@router.post("/v1/batches/{batch_id}/retry", responses=answers(Batch), openapi_extra={"parameters": [_RETRY_PARAMETER]})
async def retry(request: Request, batch_id: str) -> Response:
    """Create a batch from the lines of an ended one that have no answer in its output file.

    Its input file is a new file with these lines, and `metadata.retry_of` names the ended batch. A
    repeated call creates no other batch.
    """
    state, caller = state_of(request), caller_of(request)
    record = await state.fleet.unless_away(run_in_threadpool(find_batch, state, caller.tenant, batch_id))
    if not record.ended:
        message = f"Cannot retry a batch with status '{record.shown_state}'; cancel it, or wait until it has ended."
        raise ApiError(409, message)
    return respond(await state.fleet.unless_away(run_in(COPIES, _retry, state, caller, record, key_of(request))))


@router.delete("/v1/batches/{batch_id}", responses=answered(BatchDeleted))
def delete(request: Request, batch_id: str) -> Response:
    """Remove a batch that has ended. Its input file and its result files stay."""
    _find(request, batch_id)
    state = state_of(request)
    try:
        record = delete_batch(state.queue, state.files, batch_id)
    except KeyError:
        _find(request, batch_id)
        raise QueueUnavailable(f"{batch_id} had no record for a moment") from None
    if not record.ended:
        message = (
            f"Cannot delete a batch with status '{record.shown_state}'; cancel it first, and wait until it has ended."
        )
        raise ApiError(409, message)
    return json_response(BatchDeleted(id=batch_id, object="batch", deleted=True).as_dict())


def read_new_batch(body: Any, caller: Caller, settings: ApiSettings) -> BatchSubmission:
    """Parse a new batch; unknown keys are ignored. Raise `ApiError` 400."""
    body = fields.mapping(body, "body")
    streams_input = fields.optional(body, "input", _read_input, False)
    if streams_input and body.get("input_file_id") is not None:
        fields.fail("'input_file_id' and 'input' are given; give one.", "input", "invalid_value")
    input_file_id = "" if streams_input else _input_file_id(body)
    endpoint = BATCH_URLS[_choice(body, "endpoint", tuple(BATCH_URLS))]
    window = _choice(body, "completion_window", settings.completion_windows)
    return BatchSubmission(
        input_file_id=input_file_id,
        streams_input=streams_input,
        endpoint=endpoint,
        completion_window=window,
        seconds=window_seconds(window),
        metadata=fields.optional(body, "metadata", _metadata, None),
        priority=fields.optional(body, "priority", _priority, 0),
        tenant=caller.tenant,
        output_expires_seconds=fields.optional(body, "output_expires_after", read_expiry, None),
        max_lines=settings.max_batch_lines,
        strict_parameters=settings.strict_parameters,
        queued_tokens=caller.queued_tokens,
        open_batches=caller.open_batches,
        key_id=caller.key_id or "",
    )


def _create(request: Request, raw: bytes, undecided: threading.Lock) -> Answer:
    if not undecided.acquire(blocking=False):
        raise QueueUnavailable("the call was refused before its batch was begun")
    state, caller = state_of(request), caller_of(request)
    body = decode_body(raw)
    new = read_new_batch(body, caller, state.settings)

    def find(batch_id: str) -> dict[str, Any] | None:
        record = submitted_batch(state.queue, state.files, new.tenant, batch_id)
        return None if record is None else batch_object(record)

    return make_once(request, BATCH, body, find, lambda batch_id: _submit(state, caller, new, batch_id))


def _submit(state: ApiState, caller: Caller, new: BatchSubmission, batch_id: str | None) -> dict[str, Any]:
    with _refusing_too_many(caller):
        return batch_object(submit_batch(state.queue, state.files, new, batch_id))


def _retry(state: ApiState, caller: Caller, record: BatchRecord, key: str | None) -> Answer:
    """Retry a batch once for each key, and once without a key."""

    def find(batch_id: str) -> dict[str, Any] | None:
        found = submitted_batch(state.queue, state.files, caller.tenant, batch_id)
        return None if found is None else batch_object(found)

    def make(batch_id: str) -> dict[str, Any]:
        new = _again(record, caller, state.settings)
        try:
            with _refusing_too_many(caller):
                return batch_object(retry_batch(state.queue, state.files, record, new, batch_id))
        except BatchRefused as error:
            raise ApiError(400, str(error), param="batch_id") from None

    with state.idempotency_keys.hold(caller.tenant, f"retry {record.id}", key or "") as held:
        body, replayed = held.make_once("", new_id(BATCH, held.now), find, make)
    if replayed and key is None:
        why = f"that a retry of {record.id} made was deleted; to make another, send an 'Idempotency-Key'"
        refuse_deleted(str(state.files.batch_root(body["id"])), why)
    return body, replayed


def _again(record: BatchRecord, caller: Caller, settings: ApiSettings) -> BatchSubmission:
    """Return the submission of a retry.

    Metadata with the most pairs allowed stay as they are.
    """
    spec = record.spec
    metadata = {**(spec.metadata or {}), "retry_of": record.id}
    return BatchSubmission(
        input_file_id="",
        endpoint=spec.endpoint or "",
        completion_window=spec.completion_window or "",
        seconds=spec.completion_window_seconds or 0.0,
        metadata=metadata if len(metadata) <= _MAX_PAIRS else spec.metadata,
        priority=spec.priority,
        tenant=caller.tenant,
        output_expires_seconds=spec.output_expires_seconds,
        max_lines=settings.max_batch_lines,
        strict_parameters=settings.strict_parameters,
        queued_tokens=caller.queued_tokens,
        open_batches=caller.open_batches,
        key_id=caller.key_id or "",
    )


@contextlib.contextmanager
def _may_exist(undecided: threading.Lock, repeatable: bool = False) -> Iterator[None]:
    """Raise `MayExist` if the queue goes out of reach after the batch was begun.

    A `repeatable` call raises `QueueUnavailable` instead.
    """
    try:
        yield
    except QueueFull:
        raise
    except QueueUnavailable as error:
        if repeatable or undecided.acquire(blocking=False):
            raise
        raise MayExist(str(error)) from error


@contextlib.contextmanager
def _refusing_too_many(caller: Caller) -> Iterator[None]:
    """Raise `ApiError` 429 if the tenant has as many open batches as its key allows."""
    try:
        yield
    except TooManyBatches as error:
        most = caller.open_batches
        batches = "1 batch that has" if most == 1 else f"{most} batches that have"
        message = f"You have {batches} not ended, as many as you may have; try again when one has."
        raise ApiError(error.status, message, "rate_limit_error", code="rate_limit_exceeded") from None


def _find(request: Request, batch_id: str) -> BatchRecord:
    return find_batch(state_of(request), caller_of(request).tenant, batch_id)


def _read_input(value: Any, param: str) -> bool:
    return fields.choice(value, param, (_STREAM,)) == _STREAM


def _input_file_id(body: dict[str, Any]) -> str:
    return fields.text(fields.required(body, "input_file_id"), "input_file_id", _MAX_ID)


def _choice(body: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    return fields.choice(fields.required(body, name), name, choices)


def _priority(value: Any, param: str) -> int:
    return fields.integer(value, param, -MOST_PRIORITY, MOST_PRIORITY)


def _metadata(value: Any, param: str) -> dict[str, str]:
    pairs = fields.mapping(value, param)
    if len(pairs) > _MAX_PAIRS:
        message = (
            f"Invalid '{param}': too many properties. Expected an object with at most {_MAX_PAIRS}, but got one with"
            f" {len(pairs)}."
        )
        fields.fail(message, param, "object_above_max_properties")
    for key, text in pairs.items():
        fields.text(key, param, _MAX_KEY)
        fields.text(text, f"{param}.{fields.shown(key)}", _MAX_VALUE)
    return pairs


def _too_late(record: BatchRecord) -> ApiError:
    return ApiError(409, f"Cannot cancel a batch with status '{record.state}'.")
