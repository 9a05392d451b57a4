"""Folders that one command holds against other commands."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs.store.storage import Busy, StoreError, StoreFull, exclusive, make_folder
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
