"""The name of a request that makes something, by which a repetition of it is recognized."""

HEADER = "Idempotency-Key"
