"""A process that ends before one of its steps, as far as a bucket and Redis can see: it runs in the
test's own process, and nothing that it does after that arrives.

A process that has used the client of a bucket cannot be forked. Where the steps are in a folder,
it is one that is killed.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from jobs.batch import manifest
from jobs.queue.connection import connect
from jobs.store.object_storage import ObjectStorage, ObjectWriter
from jobs.store.storage import is_local
from tests.support.kills import killed_before_step

_STEPS = {
    ObjectStorage: ("put", "put_new", "replace_version", "link", "delete", "clear_folder", "remove_tree"),
    ObjectWriter: ("commit",),
    redis.connection.AbstractConnection: ("send_packed_command",),
}


class CutOff(BaseException):
    """The process has ended."""


def ended_before_each_step(
    client: redis.Redis, url: str, location: str, action: Callable[[redis.Redis], object]
) -> Iterator[int]:
    """Run `action` in a process that ends before its first step, then in one that ends before its
    second, and so on; give the number each time, at last of one that came to its end.

    For a location in a folder the process is killed. `action` gets a client of the process's own.
    """
    if not is_local(location):
        yield from cut_off_before_each_step(client, lambda number: action(client))
        return
    for number in itertools.count(1):
        is_killed = killed_before_step(number, lambda: action(connect(url)))
        yield number
        if not is_killed:
            return


def cut_off_before_each_step(client: redis.Redis, action: Callable[[int], object]) -> Iterator[int]:
    """Run `action` so that it ends before its first step, then before its second, and so on; give
    the number each time, which the action gets too, at last of one that came to its end.
    """
    number, is_cut = 0, True
    while is_cut:
        number += 1
        is_cut = _run_cut_off(action, number)
        for lease in client.keys("{q}:hold:*"):  # which end by themselves some seconds later
            client.delete(lease)
        yield number


def _run_cut_off(action: Callable[[int], object], number: int) -> bool:
    left = number

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if threading.current_thread() is not threading.main_thread():  # of this test's other tools
                return step(*arguments, **options)
            left -= 1
            if left <= 0:
                raise CutOff
            return step(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "PROCESS", f"process {number}")
        for owner, names in _STEPS.items():
            for name in names:
                patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            action(number)
            return False
        except CutOff:
            return True
