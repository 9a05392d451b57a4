"""Temporary folders of one process, for sockets and other short-lived files."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "pipeline-"
_OWNER = "owner.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a fresh 0700 folder, and remove it at the end.

    Its path is short, since the kernel allows a socket path only 107 bytes.
    """
    remove_abandoned()
    process = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    unheld = folder / f"{_OWNER}.new"  # renamed once locked: an unlocked owner file marks an abandoned folder
    lock = os.open(unheld, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unheld.rename(folder / _OWNER)
    try:
        yield folder
    finally:
        if os.getpid() == process:  # a forked process must not remove the folder
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's private folders whose process has ended.

    The kernel releases the lock of an ended process.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder / _OWNER):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(owner: Path) -> bool:
    lock = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
