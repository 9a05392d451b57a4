"""The completion log of a batch in a bucket: each drain writes objects that the manifest lists.

A segment begins with its index, 12 bytes for each line, followed by the lines. Names are never
reused; a segment that was never listed is removed with the rest of the log.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from jobs.daemon_threads import run_beside
from jobs.store.storage import join, new_name, open_at, remove_tree, write_bytes

FOLDER = "log"

_ENTRY = struct.Struct("<QI")  # offset of a line after the index, its number in the input
_READ_BYTES = 1 << 18
_SEGMENT_LINES = 2000


class Entry(NamedTuple):
    """A success: its line's number in the input, and the output line without its line feed."""

    line: int
    output: bytes


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A segment as listed in the manifest."""

    name: str
    lines: int
    bytes: int  # of the lines


def write_segments(root: str, first: int, entries: Iterable[Entry]) -> list[Segment]:
    """Write segments durably, numbering their lines from `first`.

    Each is written while the entries of the next one are made. Raise `StoreError`.
    """
    rest = iter(entries)
    written: list[Segment] = []
    writing: Future[Segment] | None = None
    try:
        while some := list(islice(rest, _SEGMENT_LINES)):
            if writing is not None:
                written.append(writing.result())
            writing = run_beside(partial(_write_segment, root, first, some))
            first += len(some)
    finally:
        if writing is not None:
            wait([writing])
    return written if writing is None else [*written, writing.result()]


def _write_segment(root: str, first: int, entries: Sequence[Entry]) -> Segment:
    index, size = bytearray(), 0
    for line, output in entries:
        index += _ENTRY.pack(size, line)
        size += len(output) + 1
    name = new_name(root, f"{first:09d}")
    lines = b"".join(entry.output + b"\n" for entry in entries)
    write_bytes(join(root, FOLDER, name), bytes(index) + lines, unchanging=True)
    return Segment(name, len(entries), size)


def read_segments(root: str, segments: Sequence[Segment], first: int, last: int) -> Iterator[bytes]:
    """Yield the lines `first` to `last` in pieces. Raise `StoreError`."""
    for segment, start, end in _overlapping(segments, first, last):
        places = [place for place, _ in _entries(root, segment, start, min(end + 1, segment.lines))]
        begin, behind = places[0], places[-1] if end < segment.lines else segment.bytes
        yield from _pieces(root, segment, segment.lines * _ENTRY.size + begin, segment.lines * _ENTRY.size + behind)


def lines_of_segments(root: str, segments: Sequence[Segment], first: int, last: int) -> list[int]:
    """Return the numbers in the input of the lines `first` to `last`. Raise `StoreError`."""
    found = _overlapping(segments, first, last)
    return [line for segment, start, end in found for _, line in _entries(root, segment, start, end)]


def remove_segments(root: str) -> None:
    """Remove all segments of the log."""
    remove_tree(join(root, FOLDER))


def _overlapping(segments: Sequence[Segment], first: int, last: int) -> Iterator[tuple[Segment, int, int]]:
    """Yield segments with some of these lines, and the range within the segment."""
    begin = 0
    for segment in segments:
        start, end = max(first - begin, 0), min(last - begin, segment.lines)
        if start < end:
            yield segment, start, end
        begin += segment.lines


def _entries(root: str, segment: Segment, first: int, last: int) -> list[tuple[int, int]]:
    data = _read(root, segment, first * _ENTRY.size, (last - first) * _ENTRY.size)
    return list(_ENTRY.iter_unpack(data))


def _pieces(root: str, segment: Segment, start: int, end: int) -> Iterator[bytes]:
    for place, behind in pairwise([*range(start, end, _READ_BYTES), end]):
        yield _read(root, segment, place, behind - place)


def _read(root: str, segment: Segment, offset: int, length: int) -> bytes:
    reader = open_at(join(root, FOLDER, segment.name))
    try:
        return reader.read_at(offset, length)
    finally:
        reader.close()
