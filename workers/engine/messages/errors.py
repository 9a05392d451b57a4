"""Errors that a person meets, each one sentence."""


class StepOutOfMemory(Exception):
    """A step could not be launched for want of memory; the message says what could not be had.

    A smaller one may do.
    """


class RankError(Exception):
    """The ranks of a replica cannot go on together; the message says what happened to which of
    them.
    """


class ModelLoadError(Exception):
    """A model cannot be loaded; the message says what was wrong, where, and what to do."""
