"""Files that are compressed while they are written. Equal content gives equal files."""

import contextlib
import zlib
from typing import Any

from jobs.store.storage import AtomicWriter, StoreError

_GZIP_LEVEL = 6
_GZIP_WINDOW = zlib.MAX_WBITS | 16  # with gzip's header, in which the time is 0


class CompressedWriter:
    """Compresses the content of an `AtomicWriter` with gzip or zstd."""

    def __init__(self, writer: AtomicWriter, codec: str) -> None:
        self._writer = writer
        self._stream = _Gzip(writer) if codec == "gzip" else _arrow_stream(writer, codec)
        self._open = True

    def write(self, data: bytes) -> int:
        """Append, and return the number of bytes, like a file. Raise `StoreError`."""
        self._stream.write(data)
        return len(data)

    def commit(self) -> None:
        """Make the file durable, then visible. Raise `StoreError`."""
        self._open = False
        self._stream.close()
        self._writer.commit()

    def close(self) -> None:
        """Discard uncommitted data."""
        if self._open:
            self._open = False
            with contextlib.suppress(StoreError, OSError):
                self._stream.close()  # Arrow's stream would write when it is garbage collected
        self._writer.close()


class ArrowSink:
    """A file object for pyarrow to write to; closing it does not close its `AtomicWriter`."""

    closed = False

    def __init__(self, writer: AtomicWriter) -> None:
        self._writer = writer

    def write(self, data: Any) -> int:
        return self._writer.write(bytes(data))

    def tell(self) -> int:
        return self._writer.bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


class _Gzip:
    def __init__(self, writer: AtomicWriter) -> None:
        self._writer = writer
        self._compress = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)

    def write(self, data: bytes) -> None:
        self._writer.write(self._compress.compress(data))

    def close(self) -> None:
        self._writer.write(self._compress.flush())


def _arrow_stream(writer: AtomicWriter, codec: str) -> Any:
    import pyarrow

    return pyarrow.CompressedOutputStream(pyarrow.PythonFile(ArrowSink(writer), mode="w"), codec)
