"""Batches in OpenAI's shape, and the lookup of a caller's batch."""

from typing import Any

from msgspec import UNSET

from api.answer_objects import (
    Batch,
    BatchError,
    BatchRequestCounts,
    BatchUsage,
    Errors,
    InputTokensDetails,
    OutputTokensDetails,
)
from api.state import ApiState
from jobs.batch.client import BatchRecord, get_batch
from jobs.batch.retention import is_kept
from jobs.protocol import fields
from jobs.protocol.ids import BATCH, is_id
from jobs.protocol.results import ApiError, Usage
from jobs.protocol.states import END_STATES
from jobs.queue.scripts import QueueUnavailable


def find_batch(state: ApiState, tenant: str, batch_id: str) -> BatchRecord:
    """Return the tenant's batch.

    Raises `ApiError` 404, `QueueUnavailable` for a batch that an emptied Redis has not got back
    yet, and `StoreAway`.
    """
    if is_id(BATCH, batch_id):
        try:
            record = get_batch(state.queue.redis, batch_id)
            if record.spec.tenant == tenant and record.spec.of_api:
                return record
        except KeyError:
            if is_kept(state.queue, str(state.files.root), tenant, batch_id):
                raise QueueUnavailable(f"{batch_id} has no record yet") from None
            state.files.check()
    raise ApiError(404, f"No batch found with id '{fields.shown(batch_id)}'.", param="batch_id")


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Return a batch as clients read it.

    Counts are of lines on disk, which are never removed, so states only move forward.
    """
    spec = record.spec
    times = _times(record)
    batch = Batch(
        id=record.id,
        object="batch",
        endpoint=spec.endpoint or "",
        model=record.models[0] if len(record.models) == 1 else None,
        errors=_errors(record),
        input_file_id=spec.input_file_id or "",
        completion_window=spec.completion_window or "",
        status=record.shown_state,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=times["created"],
        in_progress_at=times.get("in_progress"),
        expires_at=times.get("expires"),
        finalizing_at=times.get("finalizing"),
        completed_at=times.get("completed"),
        failed_at=times.get("failed"),
        expired_at=times.get("expired"),
        cancelling_at=times.get("cancelling"),
        cancelled_at=times.get("cancelled"),
        request_counts=BatchRequestCounts(
            total=record.total, completed=record.stored_completed, failed=record.stored_failed
        ),
        usage=_usage(record.usage),
        metadata=spec.metadata,
        priority=spec.priority or UNSET,
        risk=record.risk or UNSET,
        unknown_members=record.unknown_members or UNSET,
    )
    if spec.streams_input:
        batch.input, batch.open = "stream", record.open and not record.ended
        batch.last_append_at = times.get("appended")
    return batch.as_dict()


def _times(record: BatchRecord) -> dict[str, int]:
    """Return whole unix seconds by state, none before the batch was created, whatever clocks say.

    Of the end states only the batch's own has a time.
    """
    made = record.timestamps["created"]
    others = END_STATES - {record.state} | ({"finalizing"} if record.outcome == "expired" else set())
    return {name: int(max(made, moment)) for name, moment in record.timestamps.items() if name not in others}


def _errors(record: BatchRecord) -> Errors | None:
    if not record.errors:
        return None
    data = [
        BatchError(code=error.code, line=error.line, message=error.message, param=error.param)
        for error in record.errors
    ]
    return Errors(object="list", data=data)


def _usage(usage: Usage) -> BatchUsage:
    return BatchUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        device_seconds=usage.device_microseconds / 1e6,
    )
