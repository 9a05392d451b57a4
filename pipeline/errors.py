"""Errors that end a command, and their exit codes; 0 is success.

CommandEnd
  Refused        2      the command cannot do what was asked
  Unfinished     1      it stopped before its end
    LinesFailed  1      lines of a batch failed, or got no answer
    ChildFailed  1      a child ends again and again
      ChildRefused  2   it refused its first start, or lacks a module
  Interrupted    130    it was asked to stop
"""

import errno
from typing import IO, Any

import click

from jobs.extras import hint_for
from pipeline.stderr import write_line

_MAKE_ROOM = "free some space and run the same command again, it resumes"


class CommandEnd(click.ClickException):
    """Base of the errors that end a command; the message is one sentence."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error on stderr, unless stderr cannot be written."""
        write_line(f"Error: {self.format_message()}")


class Refused(CommandEnd):
    """The command cannot do what was asked: bad input, bad flags, a bad model."""

    exit_code = 2


class Unfinished(CommandEnd):
    """The command stopped before its end, for a reason outside of its input."""


class LinesFailed(Unfinished):
    """A batch ended with failed or unanswered lines."""


class ChildFailed(Unfinished):
    """A child ended in a way that a restart cannot repair."""


class ChildRefused(ChildFailed):
    """A child refused its first start, or lacks a module."""

    exit_code = Refused.exit_code


class Interrupted(CommandEnd):
    """A person or the system asked the command to stop."""

    exit_code = 130

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message without a prefix, since an interruption is not an error."""
        write_line(self.message)


def exit_code_of(error: BaseException) -> int:
    """Print the reason why a command ended on stderr, as one sentence; return the exit code.

    Raises unexpected errors again.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, (SystemExit, KeyboardInterrupt)):
        error = error.__cause__  # Python 3.11 wraps errors that a signal handler raises in a `__set_name__`
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return Interrupted.exit_code
    if isinstance(error, BrokenPipeError):
        return 1
    end = error if isinstance(error, click.ClickException) else explained(error)
    if end is None:
        raise error
    end.show()
    return end.exit_code


def explained(error: BaseException) -> CommandEnd | None:
    """Return the `CommandEnd` for an error of the product, Redis or the disk, else None.

    None means a fault of the program.
    """
    if isinstance(error, ModuleNotFoundError):
        install = hint_for(error.name or "")
        return None if install is None else Refused(f"{one_line(error)}: {install}")
    from jobs.errors import JobsError
    from jobs.store.storage import StoreFull
    from workers.engine.messages.errors import EngineError
    from workers.errors import WorkerError
    from workers.text.errors import TextError

    if isinstance(error, StoreFull):
        return Unfinished(f"{one_line(error)}: {_MAKE_ROOM}")
    if isinstance(error, (JobsError, EngineError, TextError, WorkerError)):
        return (Refused if error.exit_code == Refused.exit_code else Unfinished)(one_line(error))
    import redis

    if isinstance(error, redis.RedisError):
        return Unfinished(f"Redis cannot be used: {one_line(error)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unfinished(f"no space is left on the device{_at(error)}: {_MAKE_ROOM}")
    if isinstance(error, OSError) and error.errno is not None:
        return Unfinished(f"{error.strerror}{_at(error)}")
    return None


def one_line(error: object) -> str:
    """Return the error's text as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _at(error: OSError) -> str:
    return f" ({error.filename})" if error.filename else ""
