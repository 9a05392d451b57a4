"""`/v1/batches/{id}/requests` and `/close`: requests of an open batch, and its end."""

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from api.answer_objects import Batch, BatchError, BatchRequests
from api.auth import caller_of
from api.batch_objects import batch_object, find_batch
from api.http.openapi import answered
from api.http.request_body import body_memory, check_type, chunks_of
from api.http.responses import json_response
from api.state import ApiState, BlockingRoute, queue_reachable, state_of
from api.threads import APPENDS, run_in
from jobs.batch.append_groups import group_of
from jobs.batch.appending import requests_of
from jobs.batch.client import BatchRecord
from jobs.batch.input_files import ArrivingLines, InputLine
from jobs.batch.manifest import LineProblem
from jobs.batch.open_requests import AppendBounds
from jobs.batch.queued_tokens import most_tokens
from jobs.batch.source_check import MAX_PROBLEMS, ServedModels, estimated_tokens
from jobs.protocol.results import ApiError
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.tasks import wake
from jobs.store.storage import StoreFull

_TYPES = ("application/jsonl", "application/x-ndjson", "application/json", "application/octet-stream")
_GROUP_BYTES = 1024 * 1024  # bytes of lines that are appended, and made durable, at once

_BODY = {
    "requestBody": {
        "required": True,
        "description": "Lines as those of an input file",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _TYPES},
    }
}

logger = logging.getLogger(__name__)
router = APIRouter(dependencies=[Depends(queue_reachable)], route_class=BlockingRoute)


@router.post("/v1/batches/{batch_id}/requests", responses=answered(BatchRequests), openapi_extra=_BODY)
async def append(request: Request, batch_id: str) -> Response:
    """Append requests, as JSONL, to an open batch; requests that it has already change nothing.

    They are durable once this answers. A call that fails may have appended some of them.
    """
    check_type(request, _TYPES)
    state, tenant = state_of(request), caller_of(request).tenant
    appending = await state.fleet.unless_away(run_in_threadpool(_Appending, state, tenant, batch_id))
    most = state.settings.max_file_bytes
    with appending.counted():
        async for lines in _groups(request, most):
            await state.fleet.unless_away(run_in(APPENDS, appending.add, lines))
    return json_response(appending.answer().as_dict())


@router.post("/v1/batches/{batch_id}/close", responses=answered(Batch))
def close(request: Request, batch_id: str) -> Response:
    """Close an open batch: it ends once all of its requests have. May be repeated."""
    state, tenant = state_of(request), caller_of(request).tenant
    record = find_batch(state, tenant, batch_id)
    if not record.spec.streams_input:
        raise ApiError(409, f"The batch {batch_id} was made of a file, so it is not open.")
    if record.open:
        requests_of(record.spec).close()
        wake(state.queue.redis, batch_id)
        record = find_batch(state, tenant, batch_id)
    return json_response(batch_object(record))


class _Appending:
    """One call's appends to a batch."""

    def __init__(self, state: ApiState, tenant: str, batch_id: str) -> None:
        """Raise `ApiError` 404 and 409, and `QueueUnavailable`."""
        self._state, self._queue = state, state.queue
        self._record = record = find_batch(state, tenant, batch_id)
        _check_open(record)
        self._group = group_of(record.spec)
        # The batch's own models are served, whatever an emptied Redis knows so far
        self._served = ServedModels(state.queue, _refuse_unknown_model, math.inf, record.models)
        if not self._served:
            _refuse_unknown_model()
        self._bounds = AppendBounds(
            record.spec.max_lines,
            state.settings.max_file_bytes,
            most_tokens(state.queue, record.spec, record.id),
            record.spec.queued_tokens,
        )
        self._appended = self._repeated = self._failed = 0
        self._total = record.total
        self._problems: list[LineProblem] = []

    def add(self, lines: list[InputLine]) -> None:
        """Append lines durably. Raise `ApiError` and `StoreError`."""
        try:
            outcome = self._group.append(lines, self._served, self._bounds)
        except ApiError as error:
            if error.status == 409:  # perhaps because the batch was deleted
                _check_open(find_batch(self._state, self._record.spec.tenant, self._record.id))
            raise
        self._total = outcome.total
        self._appended += outcome.appended
        self._repeated += outcome.repeated
        self._failed += len(outcome.problems)
        self._problems += outcome.problems[: MAX_PROBLEMS - len(self._problems)]
        self._note_tokens(estimated_tokens(outcome.body_bytes))
        # A driver that misses this looks by itself
        wake(self._queue.redis, self._record.id)

    def _note_tokens(self, tokens: int) -> None:
        """Count the tokens for the tenant's other batches now, rather than with the next slice."""
        if self._bounds.tokens is not None:
            with contextlib.suppress(QueueUnavailable):
                self._queue.note_appended(self._record.id, tokens)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Add to a refusal how many requests of the call were appended before."""
        try:
            yield
        except (ApiError, StoreFull) as error:
            if not self._appended:
                raise
            stored = f"{self._appended} requests of this call were appended before."
            if isinstance(error, ApiError):
                raise ApiError(error.status, f"{error} {stored}", error.type, error.param, error.code) from error
            logger.error("answering 507: %s", error)
            message = f"The file store has no room left. {stored}"
            raise ApiError(507, message, "server_error", code="insufficient_storage") from error

    def answer(self) -> BatchRequests:
        """Return the outcome of all lines."""
        errors = [
            BatchError(code=one.code, line=one.line, message=one.message, param=one.param) for one in self._problems
        ]
        if more := self._failed - len(errors):
            message = f"{more} more lines are bad; the first {len(errors)} are listed."
            errors.append(BatchError(code="too_many_errors", line=None, message=message, param=None))
        return BatchRequests(
            object="batch.requests",
            batch_id=self._record.id,
            appended=self._appended,
            repeated=self._repeated,
            errors=errors,
            total=self._total,
        )


def _check_open(record: BatchRecord) -> None:
    if not record.spec.streams_input:
        raise ApiError(409, f"The batch {record.id} was made of a file, so it takes no more requests.")
    if not record.open or record.shown_state not in ("validating", "in_progress"):
        why = f"has the status '{record.shown_state}'" if record.open else "is closed"
        raise ApiError(409, f"The batch {record.id} {why}, so it takes no more requests: create another batch.")


async def _groups(request: Request, most: int) -> AsyncIterator[list[InputLine]]:
    """Yield the lines of the body without blank ones, some megabytes at a time.

    A line that the connection cut is left out. Raise `ApiError` 408, 413, 429 and 503.
    """
    arriving, lines, size, memory = ArrivingLines(), list[InputLine](), 0, body_memory(request)
    async for chunk in chunks_of(request):
        size += len(chunk)
        if size > most:
            message = f"The body is larger than {most} bytes: append the rest in calls of their own."
            raise ApiError(413, message, code="request_too_large")
        fits = memory.fits(len(chunk))
        lines += arriving.add(chunk)
        if (not fits or memory.bytes >= _GROUP_BYTES) and lines:
            yield lines
            lines, fits = [], True
            memory.give_back()
            memory.take(arriving.begun)
        if not fits:
            memory.take(len(chunk))
    if lines := lines + arriving.end():
        yield lines


def _refuse_unknown_model() -> None:
    raise QueueUnavailable("models that requests may name are not registered yet")
