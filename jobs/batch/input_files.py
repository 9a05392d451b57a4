"""Input files as lines.

JSONL is read in place; compressed JSONL, Parquet and CSV are first written as JSONL to the batch's
root.
"""

import contextlib
import gzip
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO, NamedTuple, TextIO

import msgspec

from jobs.batch.row_requests import RowOptions
from jobs.errors import JobsError
from jobs.protocol.lines import BOM
from jobs.store.input_formats import GZIP, HEAD_BYTES, JSONL, PARQUET, ZSTD, format_of_content
from jobs.store.storage import AtomicWriter, StoreError, open_input, size_of

MAX_LINE_BYTES = 64 * 1024 * 1024
SPOOL_NAME = "lines.jsonl"

CSV = ".csv"
"""A format in addition to those of `input_formats`; the store has no such files."""
TABLE_REFUSED, TABLE_UNREADABLE = 3, 4
"""Exit code of `jobs.batch.table_lines` after it wrote a sentence."""
PARENT_VARIABLE = "TABLE_READER_PARENT"
"""The reader process of a table; another version may not set it."""

_UNPACKED_BYTES = 2 << 30  # most bytes of a compressed or Parquet file of the API, or
_UNPACKED_TIMES = 10  # this multiple of its size, if that is more
_PARQUET_MEMORY_BYTES = 1 << 30
_PARQUET_CPU_SECONDS = 120
_COPY_CHUNK = 1 << 20
_SHOWN_CHARACTERS = 2000
# Pools and threads must not use up the memory limit
_READER_ENVIRONMENT = {
    "PYTHONUTF8": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
_PARQUET_SUFFIXES = (".parquet", ".pq")
_CSV_SUFFIXES = (CSV, ".csv.gz", ".csv.zst")
_SPOOLED_SUFFIXES = {PARQUET: _PARQUET_SUFFIXES, CSV: _CSV_SUFFIXES, GZIP: (".gz",), ZSTD: (".zst",)}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_NAMES = {PARQUET: "Parquet", CSV: "CSV"}
logger = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """Limits for writing a file as JSONL. The defaults are for local files."""

    most_bytes: int | None = None  # of JSONL
    most_rows: int | None = None  # of a table; later rows are left out
    memory_bytes: int = 16 << 30  # of the process that reads a table
    cpu_seconds: int | None = None  # of that process


OWN_FILE = Bounds()


def api_bounds(location: str, max_lines: int | None) -> Bounds:
    """Return the limits for unpacking a client's file in the API. Raise `StoreError`."""
    most_bytes = max(_UNPACKED_BYTES, _UNPACKED_TIMES * (size_of(location) or 0))
    # One more row, so that the file is found to have too many.
    most_rows = None if max_lines is None else max_lines + 1
    return Bounds(most_bytes, most_rows, _PARQUET_MEMORY_BYTES, _PARQUET_CPU_SECONDS)


class InputError(JobsError):
    """The file as a whole cannot be read; the text is one sentence."""

    exit_code = 2


class InputLine(NamedTuple):
    """One line that is not blank.

    `number` counts all lines from 1; `raw` is None if the line exceeds `MAX_LINE_BYTES`.
    """

    number: int
    offset: int
    raw: bytes | None


def is_parquet(location: str) -> bool:
    """Return whether a file's name is that of Parquet."""
    return location.lower().endswith(_PARQUET_SUFFIXES)


def is_csv(location: str) -> bool:
    """Return whether a file's name is that of CSV, compressed or not."""
    return location.lower().endswith(_CSV_SUFFIXES)


def compression_of(location: str) -> str | None:
    """Return pyarrow's name of a file's compression, by the file's name; None if not compressed."""
    name = location.lower()
    return next((codec for suffix, codec in _CODECS.items() if name.endswith(suffix)), None)


def is_table(location: str) -> bool:
    """Return whether a file holds rows with named columns. Raise `StoreError`."""
    return format_of(location) in _NAMES


def format_of(location: str) -> str:
    """Return the format of a file: by its name if it is a packed format, else by its content.

    Raise `StoreError`.
    """
    for kind, suffixes in _SPOOLED_SUFFIXES.items():
        if location.lower().endswith(suffixes):
            return kind
    with open_input(location) as file:
        return format_of_content(file.read(HEAD_BYTES))


def read_lines(
    file: BinaryIO, note: Callable[[bytes], object] = len, most_blank: int | None = None
) -> Iterator[InputLine]:
    """Yield every line that is not blank, in order, one in memory at a time.

    A byte order mark at the start is skipped. `note` gets every byte of the file, for a hash. Raise
    `InputError` if more than `most_blank` lines are blank.
    """
    number, offset, blank = 0, 0, 0
    if file.read(len(BOM)) == BOM:
        offset = len(BOM)
        note(BOM)
    file.seek(offset)
    while raw := file.readline(MAX_LINE_BYTES + 1):
        note(raw)
        number += 1
        length = len(raw)
        if length > MAX_LINE_BYTES:
            yield InputLine(number, offset, None)
            while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
                note(raw)
                length += len(raw)
        elif not raw.isspace():
            yield InputLine(number, offset, raw)
        else:
            blank += 1
            if most_blank is not None and blank > most_blank:
                raise InputError(f"The input file holds more than {most_blank} blank lines.")
        offset += length


class ArrivingLines:
    """Splits arriving pieces of JSONL into lines, without blank ones.

    One line is in memory; of a line that is too long, only that fact is kept.
    """

    def __init__(self) -> None:
        self._number = 0
        self._begun = bytearray()

    @property
    def begun(self) -> int:
        """Return the bytes of the line that has begun."""
        return len(self._begun)

    def add(self, data: bytes) -> list[InputLine]:
        """Return the lines that the next piece completes. Their offsets are 0."""
        *ends, rest = data.split(b"\n")
        lines = [self._end(piece) for piece in ends]
        self._keep(rest)
        return [line for line in lines if line is not None]

    def end(self) -> list[InputLine]:
        """Return the last line, if it has no line feed."""
        last = self._end(b"")
        return [] if last is None else [last]

    def _keep(self, piece: bytes) -> None:
        self._begun += piece[: MAX_LINE_BYTES + 1 - len(self._begun)]

    def _end(self, piece: bytes) -> InputLine | None:
        self._keep(piece)
        raw = bytes(self._begun)
        self._begun.clear()
        self._number += 1
        if len(raw) > MAX_LINE_BYTES:
            return InputLine(self._number, 0, None)
        return InputLine(self._number, 0, raw) if raw.strip() else None


def write_spool(
    location: str,
    spool: str,
    bounds: Bounds = OWN_FILE,
    check: Callable[[], object] = int,
    rows: RowOptions | None = None,
) -> str:
    """Write the lines of a table or of a compressed file as JSONL, and return the hash of that.

    Calls `check` often. `rows` defines the requests of a table's rows; None: by its columns. Raise
    `InputError`, also for a file that exceeds `bounds`, `StoreError` and what `check` raises.
    """
    with (
        open_input(location) as file,
        AtomicWriter(spool, unchanging=True) as writer,
        contextlib.closing(_as_jsonl(location, file, bounds, rows)) as chunks,
    ):
        try:
            for chunk in chunks:
                check()
                if bounds.most_bytes is not None and writer.bytes + len(chunk) > bounds.most_bytes:
                    raise InputError(f"{location} holds more than {bounds.most_bytes} bytes when it is unpacked")
                writer.write(chunk)
        except InputError:
            check()  # the reader may have been killed because this process ends
            raise
        writer.commit()
        return writer.sha256


def first_line(location: str, rows: RowOptions | None = None) -> bytes | None:
    """Return the first line that is not blank, of a file of any format, as JSONL.

    Return None if there is none, or if it is too long. Raise `InputError` and `StoreError`.
    """
    begun = b""
    with open_input(location) as file, contextlib.closing(_as_jsonl(location, file, rows=rows)) as chunks:
        for chunk in chunks:
            begun = (begun + chunk).removeprefix(BOM).lstrip()
            line, newline, _ = begun.partition(b"\n")
            if newline or len(begun) > MAX_LINE_BYTES:
                return line if newline else None
    return begun or None


def open_unpacked(location: str) -> Any:
    """Open a file, decompressed if its name has a compression suffix. Raise `StoreError`."""
    file, codec = open_input(location), compression_of(location)
    if codec is None:
        return file
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), codec)


def open_text(location: str) -> TextIO:
    """Open the same as text with unchanged line ends."""
    return io.TextIOWrapper(open_unpacked(location), encoding="utf-8-sig", newline="")


def _as_jsonl(
    location: str, file: BinaryIO, bounds: Bounds = OWN_FILE, rows: RowOptions | None = None
) -> Generator[bytes]:
    """Yield the file's lines in chunks of any size. Raise `InputError` and `StoreError`."""
    kind = format_of(location)
    if kind in _NAMES:
        yield from _table_lines(location, kind, bounds, rows)
    elif kind == JSONL:
        yield from iter(lambda: file.read(_COPY_CHUNK), b"")
    else:
        yield from _decompressed(location, file, kind)


def _decompressed(location: str, file: BinaryIO, kind: str) -> Iterator[bytes]:
    try:
        if kind == GZIP:
            reader: Any = gzip.GzipFile(fileobj=file)
        else:
            import pyarrow

            reader = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        while chunk := reader.read(_COPY_CHUNK):
            yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{location} cannot be decompressed: {error}") from error


def _table_lines(location: str, kind: str, bounds: Bounds, rows: RowOptions | None) -> Iterator[bytes]:
    """Yield the lines of a table from a separate process, which ends with the reading thread.

    A small file can require much memory: the process has limits, and a crash ends only it.
    """
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
        asked.write(msgspec.json.encode(rows))
        asked.seek(0)
        limits = (str(bound or 0) for bound in bounds[1:])
        reader = subprocess.Popen(
            [sys.executable, "-P", "-m", "jobs.batch.table_lines", location, kind, *limits],
            env={
                **os.environ,
                **_READER_ENVIRONMENT,
                PARENT_VARIABLE: str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        assert reader.stdout is not None
        try:
            with reader.stdout:
                while chunk := reader.stdout.read(_COPY_CHUNK):
                    yield chunk
            code = reader.wait()
        finally:
            reader.kill()
            reader.wait()
        said.seek(0)
        why = said.read().decode(errors="surrogateescape")
    if code == TABLE_UNREADABLE:
        raise StoreError(why)
    if code == -signal.SIGXCPU:
        why = f"{location} takes more than {bounds.cpu_seconds} s of computing to be read"
    elif code not in (0, TABLE_REFUSED):
        logger.error("table reader of %s exited with %s: %s", location, code, why[-_SHOWN_CHARACTERS:])
        how = signal.Signals(-code).name if code < 0 else str(code)
        why = (
            f"{location} is not a readable {_NAMES[kind]} file, or needs more memory than there is: its reader ended"
            f" with {how}"
        )
    if code:
        raise InputError(why)
