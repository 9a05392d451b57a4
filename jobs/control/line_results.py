"""Result files with one line for each answer."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from jobs.batch.manifest import Manifest
from jobs.batch.result_files import ResultFile, open_output
from jobs.control.line_answer import LineAnswer

_FLUSH_BYTES = 1 << 18


class LineWriter:
    """Writes many lines at once. Like `ParquetWriter`, it creates no file before data or a
    commit.
    """

    def __init__(
        self, manifest: Manifest, location: str, line_of: Callable[[LineAnswer], bytes], head: bytes = b""
    ) -> None:
        """Set `line_of`, which returns a line with its end, and `head`, the start of the file."""
        self._open = partial(open_output, manifest, location)
        self._line_of = line_of
        self._file: ResultFile | None = None
        self._lines = [head]
        self._size = 0

    def add(self, answer: LineAnswer) -> None:
        line = self._line_of(answer)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _FLUSH_BYTES:
            self._flush()

    def commit(self) -> None:
        self._flush().commit()

    def _flush(self) -> ResultFile:
        self._file = self._file or self._open()
        self._file.write(b"".join(self._lines))
        self._lines, self._size = [], 0
        return self._file

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        if self._file is not None:
            self._file.close()
        return False
