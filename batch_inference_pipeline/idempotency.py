"""The name of a request that makes something, by which the server recognizes a repetition."""

import secrets

from batch_inference_pipeline.vocabulary import IDEMPOTENCY_HEADER


def new_header() -> dict[str, str]:
    """Return the header of a request that is done once, however often it is sent."""
    return {IDEMPOTENCY_HEADER: secrets.token_hex(16)}
