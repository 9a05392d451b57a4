"""What is stored on disk: file primitives, the file store and API keys."""
