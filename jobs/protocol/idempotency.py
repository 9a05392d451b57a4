"""The name of a request that makes something, by which a repetition of it is recognized."""

import secrets

HEADER = "Idempotency-Key"


def new_header() -> dict[str, str]:
    """Return the header of a request that is done once, however often it is sent."""
    return {HEADER: secrets.token_hex(16)}
