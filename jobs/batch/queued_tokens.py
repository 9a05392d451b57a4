"""The queued tokens of a tenant's batches, for the admission of new requests."""

from typing import NamedTuple

from jobs.batch.manifest import BatchSpec
from jobs.batch.source_check import estimated_tokens
from jobs.protocol.states import END_STATES
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.request_queue import Queue


class QueuedTokens(NamedTuple):
    """Estimates for one batch."""

    answered: int
    queued: int  # of requests without an answer
    early: int  # of lines that run while the batch is validated, answered or not


def queued_tokens(queue: Queue, tenant: str) -> dict[str, QueuedTokens]:
    """Return the estimates of the batches that have not ended, as far as validated."""
    found = queue.statuses(queue.open_batches(tenant))
    return {batch: _tokens_of(fields) for batch, fields in found.items() if fields.state not in END_STATES}


def others_tokens(queue: Queue, tenant: str, batch: str) -> int:
    """Return the tenant's queued tokens without those of one batch.

    Early lines of other batches do not count: these batches may still be refused.
    """
    return sum(tokens.queued for one, tokens in queued_tokens(queue, tenant).items() if one != batch)


def others_early_tokens(queue: Queue, tenant: str, batch: str) -> int:
    """Return the same with early lines."""
    found = queued_tokens(queue, tenant).items()
    return sum(tokens.queued + tokens.early for one, tokens in found if one != batch)


def most_tokens(queue: Queue, spec: BatchSpec, batch: str) -> int | None:
    """Return the limit of all tokens of an open batch, with those of answered requests.

    None: any number.
    """
    if spec.queued_tokens is None:
        return None
    found = queued_tokens(queue, spec.tenant)
    own = found.pop(batch, QueuedTokens(0, 0, 0))
    return max(0, spec.queued_tokens - sum(tokens.queued for tokens in found.values()) + own.answered)


def _tokens_of(fields: BatchStatus) -> QueuedTokens:
    """Return the estimates of a batch from its counts.

    Answered lines reduce the queued tokens by their share of the lines, but by no more than their
    bytes had in Redis: otherwise many short answered lines would count for long ones.
    """
    known, lines = fields.queued_tokens, max(1, fields.total)
    finished = min(fields.finished, lines)
    before = max(0, finished - fields.used_lines)  # lines finished before this record was created
    by_bytes = known * before // lines + estimated_tokens(fields.used_bytes)
    answered = min(known * finished // lines, by_bytes)
    return QueuedTokens(answered, max(known, fields.appended_tokens) - answered, max(0, fields.early_tokens - known))
