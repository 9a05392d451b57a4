"""Lets processes that are started with this folder on PYTHONPATH read one file slowly.

Python imports this when it starts.

Which file, and how long each read of it takes, is set in the environment, see
`tests/support/slow_file.py`.
"""

import builtins
import io
import os
import time
from typing import Any

_open_as_ever = builtins.open
_SLOW_FILE = os.environ["SLOW_FILE"]
_SECONDS = float(os.environ["SLOW_FILE_SECONDS"])


class SlowReader(io.BufferedReader):
    def read(self, size: int | None = -1) -> bytes:
        time.sleep(_SECONDS)
        return super().read(size)

    def readline(self, size: int | None = -1) -> bytes:
        time.sleep(_SECONDS)
        return super().readline(size)


def open_slowly(file: Any, *arguments: Any, **options: Any) -> Any:
    if isinstance(file, str | os.PathLike) and os.fspath(file) == _SLOW_FILE:
        return SlowReader(io.FileIO(_SLOW_FILE))
    return _open_as_ever(file, *arguments, **options)


builtins.open = open_slowly
