"""The real Redis that tests run against: one private server per test process, emptied before each test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.server import PrivateServer


@contextmanager
def running_server(directory: Path | None = None) -> Iterator[PrivateServer]:
    """A private server in `directory` (or a fresh temporary one); gone, with its files, at the end."""
    with tempfile.TemporaryDirectory(prefix="redis-") as fallback, PrivateServer(directory or Path(fallback)) as server:
        yield server
