"""The Lua scripts of the queue: loaded from `jobs/queue/lua`, called by name, and retried.

They are retried while Redis cannot answer. Every script may run twice for one call, since the first
reply may be lost; plain commands that write must not be retried.
"""

import hashlib
import random
import re
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import redis

from jobs.errors import JobsError
from jobs.protocol.states import JOBS
from jobs.queue import keys

T = TypeVar("T")

MAX_ITEMS = 500
"""Most requests of one script call; a longer call would block the server for all clients."""

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 1.0
_PASSING_ERRORS = {
    "OOM": "Redis is out of memory",
    "MISCONF": "Redis cannot write its append-only file (is the disk full?)",
    "READONLY": "Redis is a read-only replica",
    "LOADING": "Redis is loading its data",
    "UNBLOCKED": "Redis became a replica during a blocking read",
    "MASTERDOWN": "Redis is a replica that lost its master",
    "NOREPLICAS": "Redis has too few replicas",
    "BUSY": "Redis is busy with a script",
    "TRYAGAIN": "Redis is moving keys",
}


class QueueUnavailable(JobsError):
    """Redis did not answer in time; nothing is lost, and the call may be repeated."""

    status = 503
    retry = True


class QueueFull(QueueUnavailable):
    """Redis has no memory left for the call; commits and drains still work, and free memory."""


class Scripts:
    """The scripts on one client. Thread-safe, like the client."""

    def __init__(self, client: redis.Redis, retry_seconds: float) -> None:
        self._client = client
        self._retry_seconds = retry_seconds

    def call(self, name: str, arguments: list[Any]) -> Any:
        """Run the script `name`. Raise `QueueUnavailable` after `retry_seconds` of trying."""
        text, digest = source(name)
        # One key names the hash slot; the scripts build the others, which share its tag.
        return persistently(lambda: self._run(text, digest, arguments), self._retry_seconds)

    def command(self, name: str, arguments: list[Any]) -> list[Any]:
        """Return the command that runs the script `name` if the server has it cached."""
        return ["EVALSHA", source(name)[1], 1, keys.LEASES, *arguments]

    def _run(self, text: str, digest: str, arguments: list[Any]) -> Any:
        execute: Callable[..., Any] = self._client.execute_command  # `evalsha` checks each argument
        try:
            return execute("EVALSHA", digest, 1, keys.LEASES, *arguments)
        except redis.exceptions.NoScriptError:
            return self._client.eval(text, 1, keys.LEASES, *arguments)


def persistently(action: Callable[[], T], retry_seconds: float) -> T:
    """Run `action`, several times if needed, and return its result.

    Raise `QueueUnavailable` if Redis does not recover in time.
    """
    deadline = time.monotonic() + retry_seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            return action()
        except redis.RedisError as error:
            reason = passing_reason(error)
            if reason is None:
                raise
            left = deadline - time.monotonic()
            if left <= 0:
                kind = QueueFull if reason == _PASSING_ERRORS["OOM"] else QueueUnavailable
                raise kind(f"{reason}: {error}") from error
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
        pause = min(2 * pause, _LONGEST_PAUSE)


def passing_reason(error: redis.RedisError) -> str | None:
    """Return what is wrong with the server if a retry can help; None for errors of our own."""
    if isinstance(error, redis.AuthenticationError):
        return None
    if isinstance(error, QueueUnavailable):  # a connection found the wrong server
        return "Redis cannot be used"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return _PASSING_ERRORS["LOADING"]
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return _PASSING_ERRORS["OOM"]
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return _PASSING_ERRORS["READONLY"]
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "Redis is out of reach"
    return next((reason for code, reason in _PASSING_ERRORS.items() if str(error).startswith(code)), None)


def is_full(error: Exception) -> bool:
    """Return whether the server had no memory left for a call."""
    return isinstance(error, QueueFull | redis.exceptions.OutOfMemoryError)


@cache
def source(name: str) -> tuple[str, str]:
    """Return the script's full text and its SHA1.

    The text has flags, key names, the shared functions that it needs, and its own lines.
    """
    folder = resources.files("jobs.queue") / "lua"
    own = (folder / f"{name}.lua").read_text()
    flags, newline, rest = own.partition("\n")
    if not flags.startswith("#!"):
        raise ValueError(f"{name}.lua must start with its flags")
    shared = needed(_RUNS + (folder / "common.lua").read_text(), rest)
    table = keys.lua_table(set(re.findall(r"\bkey\.(\w+)", shared + rest)))
    text = f"{flags}{newline}{table}\n{shared}\n{rest}"
    return text, hashlib.sha1(text.encode()).hexdigest()


def needed(shared: str, script: str) -> str:
    """Return the top-level statements of `shared` that `script` uses, directly or indirectly.

    Each call creates all closures of its script, so unused ones cost time. Every word counts as a
    name, so the result may have too many statements, never too few.
    """
    found, words = "", _words(script)
    for statement in reversed(re.split(r"^(?=local )", _COMMENT.sub("", shared), flags=re.MULTILINE)[1:]):
        # Lua resolves only names declared before, hence the order.
        if words & _words(_DECLARED.findall(statement)[0]):
            found, words = statement + found, words | _words(statement)
    return found


_RUNS = f"local RUNS = {{{', '.join(f'{state} = true' for state in JOBS)}}}\n"
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_DECLARED = re.compile(r"local (?:function )?([\w, ]+)")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", _COMMENT.sub("", text)))
