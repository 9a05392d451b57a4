"""Temporary folders of one process, for sockets and other short-lived files."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batch_inference_pipeline.errors import ServerFailed

_PREFIX = "pipeline-"
_OWNER = "owner.lock"
_LONGEST_FOLDER_PATH = 90  # the kernel allows a socket path only 107 bytes
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def private_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a fresh 0700 folder in `parent`, or the temporary folder, and remove it at the end."""
    remove_abandoned(parent)
    process = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
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


def socket_folder(folder: Path, exit_stack: contextlib.ExitStack) -> Path:
    """Return `folder`, or a private folder until `exit_stack` ends if its path is too long for
    sockets.
    """
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER_PATH:
        return folder
    for parent in _SHORT_FOLDERS:
        with contextlib.suppress(OSError):
            return exit_stack.enter_context(private_folder(parent))
    raise ServerFailed(
        f"the path of {folder} is too long for a socket, and none of {', '.join(_SHORT_FOLDERS)} can be written: set"
        " TMPDIR to a shorter path"
    )


def remove_abandoned(parent: str | None = None) -> None:
    """Remove this user's private folders in `parent` whose process has ended.

    The kernel releases the lock of an ended process.
    """
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
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
