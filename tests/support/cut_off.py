"""A process that ends before one of its steps, as far as a bucket and Redis can see: it runs in the
test's own process, and nothing that it does after that arrives.

A process that has used the client of a bucket cannot be forked. Where the steps are in a folder,
it is one that is killed.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from jobs.batch import manifest, stored_lines
from jobs.control import advance
from jobs.queue.connection import connect
from jobs.store import object_storage
from jobs.store.block_cache import BlockCache
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
    for number in itertools.count(1):
        is_cut = _run_cut_off(action, number)
        end_leases(client)
        yield number
        if not is_cut:
            return


def held_up_before_each_step(
    client: redis.Redis, action: Callable[[int], object], meanwhile: Callable[[int], object]
) -> Iterator[int]:
    """Run `action` in a process that is stopped before its first step, then in one that is stopped
    before its second, and so on; `meanwhile` runs in another one, and then the first goes on. Give
    the number each time, at last of one that was not stopped.
    """
    for number in itertools.count(1):
        was_stopped = False

        def stop(number: int = number) -> None:
            nonlocal was_stopped
            if not was_stopped:
                was_stopped = True
                end_leases(client)
                with process(f"other process {number}"):
                    meanwhile(number)

        with process(f"process {number}"), _counted_steps(number, stop):
            action(number)
        end_leases(client)
        yield number
        if not was_stopped:
            return


def end_leases(client: redis.Redis) -> None:
    """As they do by themselves, some seconds later."""
    for lease in client.keys("{q}:hold:*"):
        client.delete(lease)


def _run_cut_off(action: Callable[[int], object], number: int) -> bool:
    def cut_off() -> None:
        raise CutOff

    with process(f"process {number}"), _counted_steps(number, cut_off):
        try:
            action(number)
            return False
        except CutOff:
            return True


@contextmanager
def process(name: str) -> Iterator[None]:
    """What runs within is a process of this name, which remembers nothing of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "PROCESS", name)
        patch.setattr(advance, "_progress", {})
        patch.setattr(stored_lines, "_kept", OrderedDict())
        patch.setattr(object_storage, "_cache", BlockCache())
        yield


@contextmanager
def _counted_steps(number: int, reached: Callable[[], None]) -> Iterator[None]:
    """Call `reached` before the step of this number, and before each later one."""
    left = number

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if threading.current_thread() is threading.main_thread():  # else of this test's other tools
                left -= 1
                if left <= 0:
                    reached()
            return step(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in _STEPS.items():
            for name in names:
                patch.setattr(owner, name, counted(getattr(owner, name)))
        yield
