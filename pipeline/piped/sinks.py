"""Destinations of answers: stdout, or a file that a later run resumes."""

import os
import re
import select
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from jobs.batch.bitmap import Bitmap
from jobs.batch.manifest import load_manifest
from jobs.protocol.results import batch_request_id
from jobs.store.storage import store_error
from pipeline.errors import Refused

_STDOUT = 1
_BLOCK_BYTES = 1 << 16
_LEAST_ERROR = 400
_RETRIED_STATUS = 500  # and above: `create_batch` runs such lines again
_REST = rb'(?:(\d+)|(stdin_\d+_[0-9a-f]+))","custom_id":(?:null|"(?:[^"\\]|\\.)*"),"response":\{"status_code":(\d+)'
"""Matches an answer behind its batch's id: line number or rejected line's name, then status."""


class Sink(Protocol):
    """Accepts whole lines of answers, in order. Raises `StoreError` and `BrokenPipeError`.

    - `resumes`: whether a later run can resume it
    - `written`: lines of the batch whose answers it has from earlier runs
    - `failed`: `written` lines whose answers are errors
    - `refused`: names of rejected lines whose answers it has
    - `taken`: number of bytes written, also updated during a write
    """

    resumes: bool
    written: Bitmap
    failed: Bitmap
    refused: Container[str]
    taken: int

    def write(self, lines: Iterable[bytes]) -> None: ...
    def is_left(self) -> bool: ...
    def close(self) -> None: ...


class StdoutSink(Sink):
    """Writes to stdout; blocks while the reader of the pipe does not read."""

    resumes = False

    def __init__(self) -> None:
        self.written, self.failed, self.refused, self.taken = Bitmap(), Bitmap(), (), 0

    def write(self, lines: Iterable[bytes]) -> None:
        for count in _write_all(_STDOUT, "stdout", b"".join(lines)):
            self.taken += count

    def is_left(self) -> bool:
        """Return whether the readers of stdout are gone."""
        poll = select.poll()
        poll.register(_STDOUT, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        return None


class FileSink(Sink):
    """Appends to a file; an incomplete last line of a killed run is removed."""

    resumes = True

    def __init__(self, path: Path, batch_id: str) -> None:
        self._file = path.open("a+b", buffering=0)
        _cut_torn_line(self._file.fileno())
        self.written, self.failed, self.refused, self.taken = Bitmap(), Bitmap(), set[str](), 0
        self._read(path, batch_id)

    def write(self, lines: Iterable[bytes]) -> None:
        for count in _write_all(self._file.fileno(), self._file.name, b"".join(lines)):
            self.taken += count

    def is_left(self) -> bool:
        return False

    def close(self) -> None:
        """Make the file durable."""
        with self._file:
            os.fsync(self._file.fileno())

    def _read(self, path: Path, batch_id: str) -> None:
        """Record the lines in the file; the last answer of a line counts.

        Lines with a status of 500 or above run again.
        """
        pattern = re.compile(re.escape(_head(batch_id)) + _REST)
        with path.open("rb") as file:
            for raw in file:
                if (match := pattern.match(raw)) is None:
                    continue
                line, refused, status = match.groups()
                if refused is not None:
                    self.refused.add(refused.decode())
                else:
                    self._note(int(line), int(status))

    def _note(self, line: int, status: int) -> None:
        for lines, least in ((self.written, 0), (self.failed, _LEAST_ERROR)):
            if least <= status < _RETRIED_STATUS:
                lines.add(line)
            else:
                lines.discard(line)


def check_sink(output: Path, root: Path) -> None:
    """Raise `Refused` for an output that answers cannot be appended to.

    An existing file must have the run's folder `root` beside it.
    """
    from jobs.batch.input_files import compression_of, is_csv, is_parquet

    name = str(output)
    if is_parquet(name) or is_csv(name) or compression_of(name) is not None:
        raise Refused(f"answers to stdin are written line by line as JSONL: {output} names another format")
    if output.exists() and not output.is_file():
        raise Refused(f"the output {output} is not a file")
    if output.exists() and output.stat().st_size and not root.exists():
        raise Refused(f"{output} exists, but no run that wrote it can be resumed: remove it, or name another output")


def check_answers(output: Path, root: Path) -> None:
    """Raise `Refused` if the folder belongs to another run than the output.

    The caller holds the folder's lock.
    """
    manifest = load_manifest(str(root))
    if manifest is not None and not manifest.spec.streams_input:
        raise Refused(
            f"{root} was begun with a file, not with lines that arrive; remove that folder, or name another output"
        )
    with output.open("rb") if output.exists() else open(os.devnull, "rb") as file:
        head = _head("" if manifest is None else manifest.batch_id)
        begun = file.read(len(head))
    if begun and (manifest is None or not head.startswith(begun)):
        raise Refused(f"{output} has lines of another run than {root}: remove that folder, or name another output")


def _head(batch_id: str) -> bytes:
    """Return the beginning of the batch's answers, up to the line number."""
    return b'{"id":"' + batch_request_id(batch_id, 0)[:-1].encode()


def _write_all(descriptor: int, name: str, data: bytes) -> Iterator[int]:
    """Write data, and yield the number of bytes of each write; wait if the file is non-blocking.

    Raise `StoreError` and `BrokenPipeError`.
    """
    left = memoryview(data)
    while left:
        try:
            count = os.write(descriptor, left[:_BLOCK_BYTES])
        except BlockingIOError:
            select.select([], [descriptor], [])
            continue
        except BrokenPipeError:
            raise
        except OSError as error:
            raise store_error(f"cannot write {name}", error) from error
        left = left[count:]
        yield count


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
