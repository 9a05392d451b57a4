"""A process that is killed before one of the steps that others can see: what it does to the file
system, and what it sends to Redis.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import redis

_STEPS = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")


def killed_before_each_step(action: Callable[[], object]) -> Iterator[int]:
    """Run `action` in a process that is killed before its first step, then in one before its
    second, and so on; give the number each time, at last of one that came to its end.
    """
    number, killed = 0, True
    while killed:
        number += 1
        killed = _run_killed(action, number)
        yield number


def _run_killed(action: Callable[[], object], number: int) -> bool:
    process = os.fork()
    if process == 0:
        try:
            _kill_before(number)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"the process failed at its step {number}"
    return False


def _kill_before(number: int) -> None:
    left = number

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **options)

        return run

    for name in _STEPS:
        setattr(os, name, counted(getattr(os, name)))
    connection: Any = redis.connection.AbstractConnection
    connection.send_packed_command = counted(connection.send_packed_command)
