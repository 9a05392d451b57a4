"""Detection of the endpoint of a batch file's requests."""

import gzip
import io
from contextlib import closing
from pathlib import Path
from typing import IO, cast

import msgspec

from batch_inference_pipeline.rows import lines_of_table
from batch_inference_pipeline.vocabulary import CHAT

_PARQUET, _GZIP, _ZSTD = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class FirstLine(msgspec.Struct):
    """The member of a line that is read."""

    url: str = CHAT


def endpoint_of(path: Path) -> str:
    """Return the endpoint of a file's first request, by default chat completions.

    Raise OSError, and ValueError for a Parquet file that cannot be read.
    """
    try:
        return _decode(_first_line(path)).url
    except (msgspec.DecodeError, UnicodeDecodeError):
        return CHAT  # the server reports the invalid line


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head == _PARQUET:
            with closing(lines_of_table(path, None, str(path), most=1)) as lines:
                return next(lines, b"")
        return next((line for line in _unpacked(file, head) if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")


def _unpacked(file: IO[bytes], head: bytes) -> IO[bytes]:
    if head.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if head != _ZSTD:
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))


_decode = msgspec.json.Decoder(FirstLine).decode
