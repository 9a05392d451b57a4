"""How many tokens a tenant's batches have in queue, by which new requests are admitted."""

import contextlib
from typing import NamedTuple

import msgspec

from jobs.batch.manifest import BatchSpec
from jobs.batch.open_requests import OpenRequests
from jobs.batch.source_check import estimated_tokens
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue
from jobs.store.storage import StoreError


class QueuedTokens(NamedTuple):
    """Estimates of one batch."""

    total: int
    queued: int  # that count: of an open batch those of requests without an answer, else all


def queued_tokens(queue: Queue, tenant: str) -> dict[str, QueuedTokens]:
    """Return those of the batches that have not ended, as far as they have been checked."""
    found = queue.statuses(queue.open_batches(tenant))
    return {
        batch: _of_open(queue, batch) if fields.open else QueuedTokens(fields.queued_tokens, fields.queued_tokens)
        for batch, fields in found.items()
        if fields.state not in END_STATES
    }


def others_tokens(queue: Queue, tenant: str, batch: str) -> int:
    """Return how many tokens the tenant has in queue beside those of one batch."""
    return sum(tokens.queued for one, tokens in queued_tokens(queue, tenant).items() if one != batch)


def most_tokens(queue: Queue, spec: BatchSpec, batch: str) -> int | None:
    """Return how many tokens an open batch may have in all, those of answered requests included;
    None: any number.
    """
    if spec.queued_tokens is None:
        return None
    found = queued_tokens(queue, spec.tenant)
    own = found.pop(batch, QueuedTokens(0, 0))
    return max(0, spec.queued_tokens - sum(tokens.queued for tokens in found.values()) + own.total - own.queued)


def _of_open(queue: Queue, batch: str) -> QueuedTokens:
    """Look at what is on disk: slices of advance follow that later."""
    fields = queue.batch_fields(batch)
    tokens, lines = fields.queued_tokens, fields.total
    if fields.spec:
        with contextlib.suppress(StoreError):
            found = OpenRequests(msgspec.json.decode(fields.spec, type=BatchSpec)).committed()
            tokens, lines = estimated_tokens(found.body_bytes), found.lines
    unanswered = max(0, lines - fields.finished)
    return QueuedTokens(tokens, -(-tokens * unanswered // max(1, lines)))
