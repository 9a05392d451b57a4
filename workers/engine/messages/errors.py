"""What the engine raises. The message of each is one sentence.

EngineError
  ModelLoadError        the model cannot be loaded
  RankError             the ranks cannot go on together
  StepOutOfMemory       a step does not fit
  StepAbandoned         a step made way for a live request
  NativeUnavailable     there is no native library
  EngineStartError      the core could not be started
  EngineDeadError       the core has ended
"""


class EngineError(Exception):
    """Base of the engine's errors. `retry`: whether the same may succeed later, nothing changed."""

    exit_code = 2
    retry = False


class StepOutOfMemory(EngineError):
    """A step could not be launched for want of memory; the message says what could not be had.

    A smaller one may do.
    """


class StepAbandoned(EngineError):
    """A step was interrupted before it sampled anything; it may be launched again."""


class RankError(EngineError):
    """The ranks of a replica cannot go on together; the message says what happened to which of
    them.
    """


class ModelLoadError(EngineError):
    """A model cannot be loaded; the message says what was wrong, where, and what to do."""
