"""The offset of each line of a batch's source: 12 bytes for each number, zeros for a blank line.

Written by validate beside the plan, or with each append to an open batch.
"""

import struct
from collections.abc import Callable, Iterable

from jobs.batch.plan import PlanEntry
from jobs.protocol.lines import Line, read_line
from jobs.store.storage import AtomicWriter, RandomReader, StoreError, append_behind, join, open_at

INDEX_NAME = "lines.index"

_ENTRY = struct.Struct("<QI")  # offset, length
INDEX_ENTRY_BYTES = _ENTRY.size


class LineIndexWriter:
    """Writes the index of lines in order; `commit` makes it durable, `close` without it leaves
    nothing.

    Raise `StoreError`.
    """

    def __init__(self, root: str) -> None:
        self._file = AtomicWriter(join(root, INDEX_NAME), unchanging=True)
        self._next = 1

    def add(self, entry: PlanEntry) -> None:
        """Add one line; numbers skipped since the last one are blank lines."""
        blank = bytes(_ENTRY.size * (entry.line - self._next))
        self._file.write(blank + _ENTRY.pack(entry.offset, entry.length))
        self._next = entry.line + 1

    def commit(self) -> None:
        """Make the file visible and durable."""
        self._file.commit()

    def close(self) -> None:
        """Discard uncommitted data."""
        self._file.close()


def append_index(root: str, lines: int, entries: Iterable[PlanEntry]) -> None:
    """Write the next entries after the first `lines` of an index, durably. Raise `StoreError`."""
    append_behind(join(root, INDEX_NAME), lines * _ENTRY.size, index_bytes(entries))


def index_bytes(entries: Iterable[PlanEntry]) -> bytes:
    """Return entries in the format of a line index, without blank lines."""
    return b"".join(_ENTRY.pack(entry.offset, entry.length) for entry in entries)


class LineIndex:
    """Lines of a validated source by number.

    Thread-safe; it works on after the files were removed. Raise `StoreError`.
    """

    def __init__(self, root: str, source: str, open_file: Callable[[str], RandomReader] = open_at) -> None:
        self._location = join(root, INDEX_NAME)
        self._index = open_file(self._location)
        try:
            self._source = open_file(source)
        except StoreError:
            self._index.close()
            raise

    def custom_id(self, line: int) -> str:
        """Return the custom_id of a line, numbered from 1."""
        return self.line(line).custom_id

    def line(self, line: int) -> Line:
        """Return a line, parsed."""
        entry = self._index.read_at((line - 1) * _ENTRY.size, _ENTRY.size)
        offset, length = _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else (0, 0)
        if not length:
            raise StoreError(f"{self._location} has no line {line}")
        return read_line(self._source.read_at(offset, length))

    def close(self) -> None:
        """Close both files."""
        self._index.close()
        self._source.close()

    def __enter__(self) -> "LineIndex":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
