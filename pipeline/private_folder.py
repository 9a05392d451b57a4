"""Folders that one command has for itself: a short-lived one for a private Redis, and one that it
holds against other commands.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobs.store.storage import Busy, StoreError, StoreFull, exclusive, make_folder
from pipeline.errors import Refused

_PREFIX = "pipeline-"
_OWNER = "owner.lock"

RUN_LOCK = ".run"
"""In the folder of a run that is at work."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a fresh 0700 folder, and remove it at the end.

    Its path is short, since the kernel allows a socket path only 107 bytes.
    """
    remove_abandoned()
    process = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    unheld = folder / f"{_OWNER}.new"  # who finds the file under its name, and free, takes the folder for abandoned
    lock = os.open(unheld, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unheld.rename(folder / _OWNER)
    try:
        yield folder
    finally:
        if os.getpid() == process:  # not in a fork, which drops what it has of this
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def held(folder: str, refusal: str, patience: float = 0.0, lock: str = ".lock") -> Iterator[None]:
    """Make the folder if it is not there, and hold it by a file in it, `lock`.

    Raises `Refused`, with the sentence `refusal` if another process holds it, and `StoreFull`.
    """
    with contextlib.ExitStack() as stack:
        try:
            make_folder(folder)
            stack.enter_context(exclusive(folder, patience, lock))
        except Busy:
            raise Refused(refusal) from None
        except StoreFull:
            raise
        except StoreError as error:
            raise Refused(str(error)) from None
        yield


def empty_folder(folder: Path) -> None:
    """Remove all that is in a folder but the lock of a run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != RUN_LOCK:
            path.unlink()


def remove_abandoned() -> None:
    """Remove this user's private folders whose process has ended: the kernel releases a lock when
    its holder ends.
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
