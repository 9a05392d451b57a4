"""Exit codes of a command: 0 done, 1 stopped unfinished, 2 refused, 130 interrupted."""

import errno
import sys

import click

INTERRUPTED = 130
_ENVIRONMENT_ERRORS = (
    ("jobs.server", "ServerError"),
    ("jobs.queue.scripts", "QueueUnavailable"),
    ("jobs.store.storage", "StoreError"),
)


class Refused(click.ClickException):
    """The command cannot do what was asked: bad input, bad flags, a bad model."""

    exit_code = 2


class Unfinished(click.ClickException):
    """The command stopped before its end, for a reason outside of its input."""

    exit_code = 1


class Interrupted(Exception):
    """A person or the system asked the command to stop."""


def exit_code_of(error: BaseException) -> int:
    """Print on stderr, in one sentence, why a command ended, and return its exit code.

    Raises an unexpected error again.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, (Interrupted, KeyboardInterrupt, click.Abort)):
        if str(error):
            click.echo(str(error), err=True)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return 1
    if _is(error, "jobs.errors", "SettingsError"):
        Refused(one_line(error)).show()
        return Refused.exit_code
    sentence = explain(error)
    if sentence is None:
        raise error
    Unfinished(sentence).show()
    return Unfinished.exit_code


def explain(error: BaseException) -> str | None:
    """Return one sentence for an error of the environment (Redis, the disk), None for a fault of
    the program.
    """
    redis = sys.modules.get("redis")
    if redis is not None and isinstance(error, redis.exceptions.RedisError):
        return f"Redis cannot be used: {one_line(error)}"
    if any(_is(error, module, name) for module, name in _ENVIRONMENT_ERRORS):
        return one_line(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the device{_at(error)}: free some space and run the same command again, it resumes"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}{_at(error)}"
    return None


def one_line(error: object) -> str:
    """Return the error's text as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _is(error: BaseException, module: str, name: str) -> bool:
    """Return whether the error is of that class, without importing its module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(error, getattr(loaded, name))


def _at(error: OSError) -> str:
    return f" ({error.filename})" if error.filename else ""
