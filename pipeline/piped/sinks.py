"""Where answers go as they finish: stdout, or a file that a later run goes on with."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from jobs.batch.bitmap import Bitmap
from jobs.protocol.results import batch_request_id
from pipeline.errors import Refused

_STDOUT = 1
_BLOCK_BYTES = 1 << 16


class Sink(Protocol):
    """Takes lines of answers, whole and in order. Raises OSError.

    `resumes`: a later run goes on with it. `written` are the lines of the batch whose answers it
    has from earlier runs.
    """

    resumes: bool
    written: Bitmap

    def write(self, lines: Iterable[bytes]) -> None: ...
    def close(self) -> None: ...


class StdoutSink(Sink):
    """Waits while the reader of the pipe does."""

    resumes = False
    written = Bitmap()

    def write(self, lines: Iterable[bytes]) -> None:
        _write_all(_STDOUT, b"".join(lines))

    def close(self) -> None:
        return None


class FileSink(Sink):
    """Appends to a file; a last line that a killed run left torn is cut off."""

    resumes = True

    def __init__(self, path: Path, batch_id: str) -> None:
        self._file = path.open("a+b", buffering=0)
        _cut_torn_line(self._file.fileno())
        self.written = _lines_in(path, batch_id)

    def write(self, lines: Iterable[bytes]) -> None:
        _write_all(self._file.fileno(), b"".join(lines))

    def close(self) -> None:
        """Make the file durable."""
        with self._file:
            os.fsync(self._file.fileno())


def check_sink(output: Path, root: Path) -> None:
    """Raise `Refused` for an output that answers cannot be appended to.

    A file that exists must have `root` beside it, which says what is in it.
    """
    from jobs.batch.input_files import compression_of, is_csv, is_parquet

    name = str(output)
    if is_parquet(name) or is_csv(name) or compression_of(name) is not None:
        raise Refused(f"answers to stdin are written line by line as JSONL: {output} names another format")
    if output.exists() and not output.is_file():
        raise Refused(f"the output {output} is no file")
    if output.exists() and output.stat().st_size and not root.exists():
        raise Refused(f"{output} exists, and is of no run that could go on: remove it, or name another output")


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _cut_torn_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    position = end
    while position:
        start = max(0, position - _BLOCK_BYTES)
        found = os.pread(descriptor, position - start, start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        os.ftruncate(descriptor, position)


def _lines_in(path: Path, batch_id: str) -> Bitmap:
    """Return the lines of the batch that a file of answers has."""
    head = re.compile(rb'\{"id":"' + re.escape(batch_request_id(batch_id, 0)[:-1].encode()) + rb'(\d+)"')
    lines = Bitmap()
    with path.open("rb") as file:
        for raw in file:
            if match := head.match(raw):
                lines.add(int(match[1]))
    return lines
