"""Idempotency keys: the server recognizes a repeated request by its key."""

import secrets

from batch_inference_pipeline.vocabulary import IDEMPOTENCY_HEADER


def new_header() -> dict[str, str]:
    """Return the header of a request that takes effect once, however often it is sent."""
    return {IDEMPOTENCY_HEADER: secrets.token_hex(16)}
