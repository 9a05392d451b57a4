"""Exceptions of the engine. Each message is one sentence.

EngineError
  ModelLoadError        the model cannot be loaded
  RankError             the ranks cannot go on together
  StepOutOfMemory       a step does not fit
  StepAbandoned         a step made way for a live request
  NativeUnavailable     there is no native library
  EngineStartError      the core could not be started
  EngineDeadError       the core has ended
"""

DETAILS_HINT = "; --log-level debug shows where"
"""The end of a sentence about an unexpected error while a model is loaded."""


class EngineError(Exception):
    """Base of the engine's errors. `retry`: whether a repetition may succeed without a change."""

    exit_code = 2
    retry = False


class StepOutOfMemory(EngineError):
    """A step could not be launched for want of memory; the message is the failed allocation.

    A smaller step may fit.
    """


class StepAbandoned(EngineError):
    """A step was interrupted before it sampled anything; it may be launched again."""


class RankError(EngineError):
    """The ranks of a replica cannot continue; the message names the rank and the cause."""


class ModelLoadError(EngineError):
    """A model cannot be loaded; the message has the problem, the place and the remedy."""
