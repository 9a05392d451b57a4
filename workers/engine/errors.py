"""Errors that a person meets, each one sentence. Imports no torch."""


class ModelLoadError(Exception):
    """A model cannot be loaded; the message says what was wrong, where, and what to do."""
