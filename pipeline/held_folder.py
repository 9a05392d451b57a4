"""Folders that one command holds against other commands."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs.store.storage import Busy, StoreError, StoreFull, exclusive, is_missing, make_folder
from pipeline.errors import Refused

RUN_LOCK = ".run"
"""In the folder of a run that is at work."""


@contextlib.contextmanager
def held(folder: str, refusal: str, patience: float = 0.0, lock: str = ".lock") -> Iterator[None]:
    """Make the folder if it is not there, and hold it by a file in it, `lock`.

    Raises `Refused`, with the sentence `refusal` if another process holds it, and `StoreFull`.
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
        if is_missing(error) and not Path(folder).exists():
            return False
        raise
    return True


def empty_folder(folder: Path) -> None:
    """Remove all that is in a folder but the lock of a run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != RUN_LOCK:
            path.unlink()
