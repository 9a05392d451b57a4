"""The idempotency key of a creating request, by which a repetition is recognized."""

import secrets

HEADER = "Idempotency-Key"


def new_header() -> dict[str, str]:
    """Return the header of a request that takes effect once, however often it is sent."""
    return {HEADER: secrets.token_hex(16)}
