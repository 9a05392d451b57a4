"""The completion log of a batch: output lines of its successes, in the order of their drain.

An index has 12 bytes for each line. Both files hold at least the lines counted by the manifest
(`Manifest.logged`). Data after these is from a killed slice, is never read, and is cut off by the
next append. If all lines of a batch were drained at once, the log is its output file under a second
name.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from jobs.batch.log_segments import Entry, Segment, lines_of_segments, read_segments, remove_segments, write_segments
from jobs.store.storage import StoreError, append_behind, delete, is_local, join, link, open_input, size_of

LOG_NAME = "completed.jsonl"
INDEX_NAME = "completed.index"

_ENTRY = struct.Struct("<QI")  # offset of an entry's line in the log, its number in the input
_READ_BYTES = 1 << 18


class Extent(NamedTuple):
    """The committed length of the log."""

    lines: int = 0
    bytes: int = 0
    segments: tuple[Segment, ...] = ()  # only for a batch in a bucket


def append_log(root: str, extent: Extent, entries: Iterable[Entry]) -> Extent:
    """Append entries after `extent`, durably; return the new extent, for the manifest to commit.

    Raise `StoreError`.
    """
    if not is_local(root):
        written = write_segments(root, extent.lines, entries)
        segments = (*extent.segments, *written)
        return Extent(sum(one.lines for one in segments), sum(one.bytes for one in segments), segments)
    index, outputs, size = bytearray(), list[bytes](), extent.bytes
    for line, output in entries:
        index += _ENTRY.pack(size, line)
        outputs += output, b"\n"
        size += len(output) + 1
    _append(join(root, LOG_NAME), extent.bytes, b"".join(outputs))
    _append(join(root, INDEX_NAME), extent.lines * _ENTRY.size, bytes(index))
    return Extent(extent.lines + len(index) // _ENTRY.size, size)


def adopt_log(root: str, output: str, lines: Iterable[int]) -> Extent:
    """Make an output file the log of a batch that has none, and return its extent.

    `lines` are the numbers of its lines in the input. The manifest commits the extent. Raise
    `StoreError`.
    """
    if not is_local(root):  # existing segments may be of another process that resumed
        with open_input(output) as file:
            written = [Entry(line, content[:-1]) for line, content in zip(lines, file, strict=True)]
        return append_log(root, Extent(), written)
    remove_log(root)
    link(output, join(root, LOG_NAME))
    index, size = bytearray(), 0
    with open_input(output) as file:
        for line, content in zip(lines, file, strict=True):
            index += _ENTRY.pack(size, line)
            size += len(content)
    _append(join(root, INDEX_NAME), 0, bytes(index))
    return Extent(len(index) // _ENTRY.size, size)


def read_log(root: str, extent: Extent, offset: int, limit: int | None = None) -> tuple[Iterator[bytes], int]:
    """Return an iterator over output lines from `offset` on, as pieces of JSONL, and the next
    offset.

    It has at most `limit` lines (None: all). A request beyond the end continues at the end. Raise
    `StoreError`.
    """
    offset = min(offset, extent.lines)
    last = extent.lines if limit is None else min(offset + limit, extent.lines)
    if last == offset:
        return iter(()), last
    if extent.segments:
        return read_segments(root, extent.segments, offset, last), last
    with open_input(join(root, INDEX_NAME)) as index:
        start, end = _place(index, offset), extent.bytes if last == extent.lines else _place(index, last)
    return _pieces(open_input(join(root, LOG_NAME)), start, end), last


def logged_lines(root: str, first: int, last: int, segments: Sequence[Segment] = ()) -> list[int]:
    """Return the line numbers of the entries `first` to `last`. Raise `StoreError`."""
    if first >= last:
        return []
    if segments:
        return lines_of_segments(root, segments, first, last)
    with open_input(join(root, INDEX_NAME)) as index:
        index.seek(first * _ENTRY.size)
        data = index.read((last - first) * _ENTRY.size)
    if len(data) < (last - first) * _ENTRY.size:
        raise StoreError(f"{join(root, INDEX_NAME)} is shorter than recorded")
    return [line for _, line in _ENTRY.iter_unpack(data)]


def sound_extent(root: str, extent: Extent) -> Extent:
    """Return `extent`, or the shorter one that a damaged log still has. Raise `StoreError`."""
    if extent.segments:  # segments are complete, or cannot be read
        return extent
    size = size_of(join(root, LOG_NAME)) or 0
    lines = min(extent.lines, (size_of(join(root, INDEX_NAME)) or 0) // _ENTRY.size)
    if lines == extent.lines and size >= extent.bytes:
        return extent
    if not lines:
        return Extent()
    with open_input(join(root, INDEX_NAME)) as index:
        while lines and _place(index, lines - 1) >= size:
            lines -= 1
        # The last line may be cut off.
        return Extent(lines - 1, _place(index, lines - 1)) if lines else Extent()


def remove_log(root: str) -> None:
    """Remove the log of a batch whose output has expired. Raise `StoreError`."""
    if not is_local(root):
        remove_segments(root)
        return
    delete(join(root, INDEX_NAME))
    delete(join(root, LOG_NAME))


def _append(location: str, size: int, data: bytes) -> None:
    if size == 0:
        delete(location)  # it may be a second name of an output file
    append_behind(location, size, data)


def _place(index: BinaryIO, entry: int) -> int:
    index.seek(entry * _ENTRY.size)
    data = index.read(_ENTRY.size)
    if len(data) < _ENTRY.size:
        raise StoreError(f"{INDEX_NAME} is shorter than recorded")
    found: int = _ENTRY.unpack(data)[0]
    return found


def _pieces(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(start)
        while start < end:
            piece = file.read(min(_READ_BYTES, end - start))
            if not piece:
                raise StoreError(f"{LOG_NAME} is shorter than recorded")
            start += len(piece)
            yield piece
