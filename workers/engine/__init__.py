"""The engine: token ids in, token ids out. Knows nothing of Redis, HTTP or text."""
