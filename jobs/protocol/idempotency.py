"""The idempotency key of a creating request, by which a repetition is recognized."""

HEADER = "Idempotency-Key"
