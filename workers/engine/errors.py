"""Errors that a person meets, each one sentence. Imports no torch."""


class StepOutOfMemory(Exception):
    """A step could not be launched for want of memory; the message says what could not be had. A smaller one may do."""


class ModelLoadError(Exception):
    """A model cannot be loaded; the message says what was wrong, where, and what to do."""
