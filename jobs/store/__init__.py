"""The data on disk: file primitives, the file store and API keys."""
