"""Files that cannot be read for now, though nothing is wrong with them."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Let this process open `left` files at once and no more, beside those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def denied(file: Path) -> Iterator[None]:
    """Let this process not read a file; it is another user meanwhile where it may read all."""
    mode, user = file.stat().st_mode, os.geteuid()
    try:
        file.chmod(0)
        if user == 0:
            _become_nobody()
        yield
    finally:
        os.seteuid(user)
        file.chmod(mode)


def _become_nobody() -> None:
    try:
        os.seteuid(_NOBODY)
    except OSError as error:  # a container without that right, or with one user
        pytest.skip(f"this process cannot be another user: {error}")


@contextmanager
def led_to(file: Path, target: Path) -> Iterator[None]:
    """Have a link in place of a file."""
    aside = file.rename(f"{file.parent}.{file.name}")
    file.symlink_to(target)
    try:
        yield
    finally:
        aside.replace(file)


@contextmanager
def in_circles(file: Path) -> Iterator[None]:
    """Have a link to itself in place of a file, which no user can open."""
    with led_to(file, file):
        yield


@contextmanager
def breaking(file: Path) -> Iterator[None]:
    """Have in place of a file one that is opened, and cannot be read."""
    with led_to(file, Path("/proc/self/mem")):
        yield
