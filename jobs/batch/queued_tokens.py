"""How many tokens a tenant's batches have in queue, by which new requests are admitted."""

from typing import NamedTuple

from jobs.batch.manifest import BatchSpec
from jobs.batch.source_check import estimated_tokens
from jobs.protocol.states import END_STATES
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.request_queue import Queue


class QueuedTokens(NamedTuple):
    """Estimates of one batch."""

    answered: int
    queued: int  # of the requests without an answer
    early: int  # of lines that run while the batch is validated, answered or not


def queued_tokens(queue: Queue, tenant: str) -> dict[str, QueuedTokens]:
    """Return those of the batches that have not ended, as far as they have been checked."""
    found = queue.statuses(queue.open_batches(tenant))
    return {batch: _tokens_of(fields) for batch, fields in found.items() if fields.state not in END_STATES}


def others_tokens(queue: Queue, tenant: str, batch: str) -> int:
    """Return how many tokens the tenant has in queue beside those of one batch.

    Early lines of other batches do not count: these may still be refused.
    """
    return sum(tokens.queued for one, tokens in queued_tokens(queue, tenant).items() if one != batch)


def others_early_tokens(queue: Queue, tenant: str, batch: str) -> int:
    """Return the same with early lines."""
    found = queued_tokens(queue, tenant).items()
    return sum(tokens.queued + tokens.early for one, tokens in found if one != batch)


def most_tokens(queue: Queue, spec: BatchSpec, batch: str) -> int | None:
    """Return how many tokens an open batch may have in all, those of answered requests included;
    None: any number.
    """
    if spec.queued_tokens is None:
        return None
    found = queued_tokens(queue, spec.tenant)
    own = found.pop(batch, QueuedTokens(0, 0, 0))
    return max(0, spec.queued_tokens - sum(tokens.queued for tokens in found.values()) + own.answered)


def _tokens_of(fields: BatchStatus) -> QueuedTokens:
    """Take as answered the share of the lines that were, but no more than these had bytes in Redis:
    many short ones among them leave the long ones in queue.
    """
    known, lines = fields.queued_tokens, max(1, fields.total)
    finished = min(fields.finished, lines)
    before = max(0, finished - fields.used_lines)  # this record was made
    by_bytes = known * before // lines + estimated_tokens(fields.used_bytes)
    answered = min(known * finished // lines, by_bytes)
    return QueuedTokens(answered, max(known, fields.appended_tokens) - answered, max(0, fields.early_tokens - known))
