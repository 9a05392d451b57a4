"""Folders that one command locks against other commands."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs.store.storage import Busy, StoreError, StoreFull, exclusive, is_missing, make_folder
from pipeline.errors import Refused

RUN_LOCK = ".run"
"""Name of the lock file in the folder of a running run."""


@contextlib.contextmanager
def held(folder: str, refusal: str, patience: float = 0.0, lock: str = ".lock") -> Iterator[None]:
    """Create the folder if it is missing, and lock it by the file `lock` in it.

    Raises `Refused`, with the message `refusal` if another process has the lock, and `StoreFull`.
    """
    with contextlib.ExitStack() as stack:
        try:
            while not _enter(stack, exclusive(folder, patience, lock), folder):
                pass
        except Busy:
            raise Refused(refusal) from None
        except StoreFull:
            raise
        except StoreError as error:
            raise Refused(str(error)) from None
        yield


def _enter(stack: contextlib.ExitStack, hold: contextlib.AbstractContextManager[None], folder: str) -> bool:
    """Make the folder and hold it; return False if its holder removed it between."""
    make_folder(folder)
    try:
        stack.enter_context(hold)
    except StoreError as error:
        if not is_missing(error):
            raise
    return Path(folder).exists()


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder except the lock file of a run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != RUN_LOCK:
            path.unlink()
