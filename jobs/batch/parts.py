"""Part files: finished results on disk, sorted by line.

A part counts only while the manifest lists it; each record has a checksum.
"""

import bisect
import heapq
import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import BinaryIO, NamedTuple

import msgspec

from jobs.errors import JobsError
from jobs.protocol.requests import pack, unpack_result
from jobs.protocol.results import Result
from jobs.store.storage import (
    AtomicWriter,
    StoreError,
    add_folder,
    delete,
    is_missing,
    join,
    list_names,
    named,
    new_name,
    open_input,
    sha256_of,
    size_of,
)

FOLDER = "parts"
MAX_OPEN = 128
"""Parts merged at once; more are merged in rounds."""

_HEADER = struct.Struct("<III")  # line, length of the result, CRC-32 of line and result
_LINE = struct.Struct("<I")
# Bytes; `_TIER_PARTS` small parts of a tier become one.
_SMALL_TIERS = (1 << 20, 8 << 20, 64 << 20)
_TIER_PARTS = 16
_INDEXED_EVERY = 64  # records per index entry


class Part(msgspec.Struct, frozen=True):
    """A part as listed in the manifest."""

    name: str
    lines: int
    bytes: int
    sha256: str


class PartDamaged(JobsError):
    """A part file is missing or damaged.

    A part that cannot be read at the moment (no file descriptors, for example) may be intact.
    """


class Record(NamedTuple):
    """One finished line; `order` is the part's place in a merge, in which the earlier part wins."""

    line: int
    order: int
    packed: bytes

    @property
    def result(self) -> Result:
        """Return the result as committed."""
        return unpack_result(self.packed)


def write_part(root: str, name: str, results: Iterable[tuple[int, Result]]) -> Part:
    """Write a part durably from results sorted by line. Raise `StoreError`."""
    return write_records(root, name, (Record(line, 0, pack(result)) for line, result in results))


def write_records(root: str, name: str, records: Iterable[Record]) -> Part:
    """Write a part like `write_part`, from records."""
    folder, name = join(root, FOLDER), new_name(root, name)
    add_folder(folder)  # never the batch's own folder: without it, the batch is lost
    count = 0
    with AtomicWriter(join(folder, name), unchanging=True) as writer:
        for line, _, packed in records:
            writer.write(_HEADER.pack(line, len(packed), zlib.crc32(packed, zlib.crc32(_LINE.pack(line)))) + packed)
            count += 1
        writer.commit()
        return Part(name, count, writer.bytes, writer.sha256)


class PartIndex:
    """Finds the records of a part by line, with a sparse index in memory.

    `damage` is why records are missing: only those before the damage are found.
    """

    def __init__(self, root: str, name: str) -> None:
        self.damage: PartDamaged | None = None
        self._root = root
        self._name = name
        self._lines: list[int] = []  # lines of some records, ascending, and the records' offsets
        self._places: list[int] = []
        self._last = -1
        place = 0
        for number, record in enumerate(self._read(0)):
            if number % _INDEXED_EVERY == 0:
                self._lines.append(record.line)
                self._places.append(place)
            place += _HEADER.size + len(record.packed)
            self._last = record.line

    def records(self, lines: Iterable[int]) -> Iterator[Record]:
        """Yield the part's records of these lines, which must ascend."""
        held = itertools.takewhile(lambda line: line <= self._last, lines)
        for near, group in itertools.groupby(held, lambda line: bisect.bisect_right(self._lines, line) - 1):
            wanted = set(group)
            last = max(wanted)
            for record in self._read(self._places[near]) if near >= 0 else ():
                if record.line in wanted:
                    yield record
                if record.line >= last:
                    break

    def _read(self, place: int) -> Iterator[Record]:
        try:
            yield from read_part(self._root, self._name, place=place)
        except PartDamaged as error:
            self.damage = error


def read_part(root: str, name: str, order: int = 0, place: int = 0) -> Iterator[Record]:
    """Yield the records of a part, in line order, from the one at offset `place`.

    Raise `PartDamaged` if there is no such part, and at the first damaged record; raise
    `StoreError` if it cannot be read.
    """
    location = join(root, FOLDER, name)
    try:
        with open_input(location, unchanging=True) as file, named("cannot read", location):
            yield from _records(file, name, order, place)
    except StoreError as error:
        if is_missing(error):
            raise PartDamaged(str(error)) from error
        raise


def salvage(root: str, name: str, order: int = 0) -> Iterator[Record]:
    """Yield the records of a part, up to its damage if there is any. Raise `StoreError`."""
    try:
        yield from read_part(root, name, order)
    except PartDamaged:
        return


ReadPart = Callable[[str, str, int], Iterator[Record]]
"""Reads a part of a root by its name; its records come after those of parts of lower order."""


def merge_parts(root: str, parts: list[Part], read: ReadPart = salvage) -> Iterator[Record]:
    """Yield the records of all parts in line order, each line once.

    The first of two results of a line counts. A damaged part yields its records before the damage,
    unless `read` is `read_part`. Raise `StoreError` if a part cannot be read.
    """
    with ExitStack() as stack:
        level = [part.name for part in parts]
        while len(level) > MAX_OPEN:
            level = [
                _merge_round(root, level[start : start + MAX_OPEN], read, stack)
                for start in range(0, len(level), MAX_OPEN)
            ]
        yield from _merged(root, level, read)


def verify(root: str, part: Part) -> bool:
    """Return whether a part's file is the registered one. Raise `StoreError`."""
    location = join(root, FOLDER, part.name)
    return size_of(location) == part.bytes and sha256_of(location) == part.sha256


def to_compact(parts: list[Part]) -> list[Part]:
    """Return parts to merge into one, so that their number grows with the logarithm of the batch.

    Empty while there are few.
    """
    floor = 0
    for ceiling in _SMALL_TIERS:
        tier = [part for part in parts if floor <= part.bytes < ceiling]
        if len(tier) >= _TIER_PARTS:
            return tier
        floor = ceiling
    return []


def drop_unlisted(root: str, parts: Iterable[Part], last: int) -> int:
    """Remove unlisted part files with numbers up to `last`, the manifest's `next_part`.

    Others may be of a process that resumed. Return the highest number found, which begins a name; 0
    without any file.
    """
    listed, names = {part.name for part in parts}, list_names(join(root, FOLDER))
    _remove(root, (name for name in names if name not in listed and _number(name) <= last))
    return max(map(_number, names), default=0)


def drop_all(root: str) -> None:
    """Remove all part files."""
    _remove(root, list_names(join(root, FOLDER)))


def _remove(root: str, names: Iterable[str]) -> None:
    for name in names:
        delete(join(root, FOLDER, name))


def _number(name: str) -> int:
    number, _, _ = name.partition("-")
    return int(number) if number.isdecimal() else 0


def _records(file: BinaryIO, name: str, order: int, place: int) -> Iterator[Record]:
    left = file.seek(0, io.SEEK_END) - place
    file.seek(place)
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise PartDamaged(f"{name} ends within a record")
        line, length, checksum = _HEADER.unpack(header)
        left -= _HEADER.size + length
        # A damaged length must not allocate gigabytes.
        packed = file.read(length) if left >= 0 else b""
        if zlib.crc32(packed, zlib.crc32(header[: _LINE.size])) != checksum:
            raise PartDamaged(f"{name} is damaged at line {line}")
        yield Record(line, order, packed)


def _merged(root: str, names: list[str], read: ReadPart) -> Iterator[Record]:
    last = -1
    for record in heapq.merge(*(read(root, name, order) for order, name in enumerate(names))):
        if record.line != last:
            yield record
        last = record.line


def _merge_round(root: str, names: list[str], read: ReadPart, stack: ExitStack) -> str:
    merged = write_records(root, f"merge-{names[0]}", _merged(root, names, read)).name
    stack.callback(delete, join(root, FOLDER, merged))
    return merged
