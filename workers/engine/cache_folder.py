"""Where the engine keeps on disk what it can make again."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Below XDG_CACHE_HOME (XDG Base Directory Specification), ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "batch-inference-pipeline"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time create the file at `path`.

    Without effect where the folder cannot be written, or does not support locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Neither a link that another user left there nor a pipe
        handle = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
