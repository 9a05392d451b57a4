"""A kill at one exact point, inside the test's own process or of a process of its own."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.connection import AbstractConnection

_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link"}


class Killed(BaseException):
    """Raised where a process is to be killed; nothing may catch it on the way out."""


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
    among: Callable[[tuple[Any, ...]], bool] = lambda arguments: True,
) -> Iterator[None]:
    """Fail unless what runs within is killed at its first call of `owner.name`, before or after it;
    of calls whose arguments are `among` those meant.
    """
    real = getattr(owner, name)

    def die(*arguments: Any, **options: Any) -> Any:
        if not among(arguments):
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            yield


def killed_before_step(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a process of its own, which gets SIGKILL before its step of this number, from
    1; return whether it came that far.

    Each change of a folder, each opening of a file to write and all that is sent to Redis is a
    step. `action` uses no connection that this process has opened.
    """
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action failed"
        return os.WIFSIGNALED(status)
    code = 1
    try:
        _kill_before_step(number)
        action()
        code = 0
    finally:
        os._exit(code)


def _kill_before_step(number: int) -> None:
    steps, send = 0, AbstractConnection.send_packed_command

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            step()

    def send_counted(*arguments: Any, **options: Any) -> Any:
        step()
        return send(*arguments, **options)

    sys.addaudithook(watch)
    AbstractConnection.send_packed_command = send_counted  # type: ignore[method-assign]
