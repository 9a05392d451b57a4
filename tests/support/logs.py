"""The log of this process, as it was before."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def kept_log() -> Iterator[None]:
    """Take back what a command does to this process' log."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
