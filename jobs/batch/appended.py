"""The requests appended to an open batch in a bucket.

Each append writes an object, a piece; one more object lists the committed pieces. A piece has
entries of the line index, entries of the plan, the ids of its lines in order, and the lines. Many
small pieces are merged into one; the merged ones are removed at the batch's end, since other
processes may read them.
"""

import bisect
import contextlib
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO, NamedTuple, cast

import msgspec

from jobs.batch.line_index import INDEX_ENTRY_BYTES, INDEX_NAME, index_bytes
from jobs.batch.plan import PLAN_ENTRY_BYTES, PLAN_NAME, PlanEntry, plan_bytes
from jobs.store.block_cache import ObjectReader
from jobs.store.storage import (
    AtomicWriter,
    RandomReader,
    StoreError,
    clear_folder,
    is_missing,
    join,
    new_name,
    open_at,
    read_version,
    replace_version,
    write_bytes,
    write_new,
)

_FOLDER, _LIST = "requests", "appended.json"
_ID = struct.Struct("<16s16sQ")  # id, digest, number of the line
_ID_BYTES = 16
_MERGED = 16  # pieces of one tier are merged into one of the next
_MOST_MERGED_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class Committed(msgspec.Struct, frozen=True):
    """The committed state of an open batch's files."""

    lines: int = 0
    bytes: int = 0  # of the source
    body_bytes: int = 0
    models: list[str] = []  # models that the lines name
    endpoints: list[str] = []
    appended_at: float = 0.0  # when the last line was appended, unix seconds; 0: none was
    closed: bool = False


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece as listed."""

    name: str
    lines: int
    bytes: int  # of the lines
    tier: int = 0


class Appended(msgspec.Struct, frozen=True):
    """The list of committed pieces."""

    committed: Committed = Committed()
    pieces: tuple[Piece, ...] = ()
    token: str = ""  # makes every content of the list different
    version: str = ""  # version of the list when it was read


_decode = msgspec.json.Decoder(Appended).decode
decode_committed = msgspec.json.Decoder(Committed).decode


class AppendedLine(NamedTuple):
    """A line of the batch."""

    digest: bytes
    line: int


class _Section(NamedTuple):
    """A section of each piece: bytes per line, and bytes of the lines before it in the piece."""

    each: int
    before: int


_INDEX = _Section(INDEX_ENTRY_BYTES, 0)
_PLAN = _Section(PLAN_ENTRY_BYTES, _INDEX.before + _INDEX.each)
_IDS = _Section(_ID.size, _PLAN.before + _PLAN.each)
_SOURCE = _Section(0, _IDS.before + _IDS.each)
_NAMED = {INDEX_NAME: _INDEX, PLAN_NAME: _PLAN}


def begin(root: str) -> None:
    """Create an empty list, unless there is one. Raise `StoreError`."""
    write_new(_list_of(root), _encoded(Appended()))


def read_appended(root: str) -> Appended:
    """Return the list of committed pieces of a batch. Raise `StoreError`."""
    stored = read_version(_list_of(root))
    try:
        found = _decode(stored.data)
    except msgspec.DecodeError as error:
        raise StoreError(f"{_list_of(root)} is no list of requests: {error}") from error
    return msgspec.structs.replace(found, version=stored.version)


def replace_appended(root: str, found: Appended, committed: Committed, pieces: Sequence[Piece]) -> bool:
    """Replace the list; return False if it has changed since it was read.

    Raise `StoreError`.
    """
    return replace_version(_list_of(root), _encoded(Appended(committed, tuple(pieces))), found.version) is not None


def write_piece(
    root: str,
    entries: Iterable[PlanEntry],
    planned: Iterable[PlanEntry],
    known: dict[bytes, AppendedLine],
    content: bytes,
) -> Piece:
    """Write a piece durably; it is committed once it is listed. Raise `StoreError`."""
    ids = b"".join(sorted(_ID.pack(name, *line) for name, line in known.items()))
    return _write(root, [index_bytes(entries), plan_bytes(planned), ids, content], len(known), len(content), 0)


def merge_pieces(root: str, pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with the same lines; the last ones are merged if they are many and small.

    Raise `StoreError`.
    """
    merged = list(pieces)
    while len(some := merged[-_MERGED:]) == _MERGED and len({piece.tier for piece in some}) == 1:
        if sum(piece.bytes for piece in some) > _MOST_MERGED_BYTES:
            break
        merged[-_MERGED:] = [_merge(root, some)]
    return merged


def find_known(root: str, pieces: Sequence[Piece], ids: Iterable[bytes]) -> dict[bytes, AppendedLine]:
    """Return the lines in the pieces that have these ids. Raise `StoreError`."""
    wanted = sorted(set(ids))
    return {name: line for piece in (pieces if wanted else ()) for name, line in _known_in(root, piece, wanted)}


def _known_in(root: str, piece: Piece, wanted: Sequence[bytes]) -> Iterator[tuple[bytes, AppendedLine]]:
    """Yield the lines with these ids. A few ids read little of a large piece."""
    begin, is_small = piece.lines * _IDS.before, piece.lines < len(wanted) * piece.lines.bit_length()
    with contextlib.closing(open_at(_location(root, piece))) as reader:
        data = reader.read_at(begin, _size(piece, _IDS)) if is_small else None

        def entry(place: int) -> bytes:
            if data is None:
                return reader.read_at(begin + place * _ID.size, _ID.size)
            return _id_at(data, place, _ID.size)

        for name in wanted:
            place = bisect.bisect_left(range(piece.lines), name, key=lambda place: entry(place)[:_ID_BYTES])
            if place < piece.lines and (found := entry(place)).startswith(name):
                _, digest, line = _ID.unpack(found)
                yield name, AppendedLine(digest, line)


def remove_appended(root: str) -> None:
    """Remove all pieces and the list, once the batch has its files. Raise `StoreError`."""
    clear_folder(join(root, _FOLDER), _LIST)


class AppendedFiles:
    """The source, the plan and the line index of an open batch, composed of its pieces.

    Later appends are found when a reader needs them. Methods raise `StoreError`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._pieces: tuple[Piece, ...] = ()
        self._ends: dict[_Section, list[int]] = {section: [] for section in (_INDEX, _PLAN, _SOURCE)}

    def open_at(self, location: str) -> RandomReader:
        """Return a reader of the file of this name."""
        section = _section_of(location)

        def read_at(offset: int, length: int) -> bytes:
            if offset + length > max(self._ends[section], default=0):
                self._grow()
            return b"".join(self._read(section, offset, length))

        return ObjectReader(0, read_at)

    def open_input(self, location: str) -> BinaryIO:
        """Return an unbuffered reader that can seek to the lines of the plan."""
        return cast(BinaryIO, self.open_at(location))

    def write(self, location: str, check: Callable[[], object]) -> str:
        """Write a file of this name as one object, and return its hash; calls `check` often."""
        section = _section_of(location)
        self._grow()
        with AtomicWriter(location, unchanging=True) as writer:
            for offset in range(0, max(self._ends[section], default=0), _READ_BYTES):
                check()
                writer.write(b"".join(self._read(section, offset, _READ_BYTES)))
            writer.commit()
            return writer.sha256

    def _grow(self) -> None:
        try:
            self._pieces = read_appended(self._root).pieces
        except StoreError as error:
            if not is_missing(error):  # the list is missing once the batch has its files
                raise
        for section in self._ends:
            self._ends[section] = list(accumulate(_size(piece, section) for piece in self._pieces))

    def _read(self, section: _Section, offset: int, length: int) -> Iterator[bytes]:
        ends, stop = self._ends[section], offset + length
        for place in range(bisect.bisect_right(ends, offset), len(ends)):
            begin = ends[place] - _size(self._pieces[place], section)
            if begin >= stop:
                break
            start = max(offset, begin) - begin
            yield _read(self._root, self._pieces[place], section, start, min(stop, ends[place]) - begin - start)


def _section_of(location: str) -> _Section:
    return _NAMED.get(location.rpartition("/")[2], _SOURCE)


def _list_of(root: str) -> str:
    return join(root, _FOLDER, _LIST)


def _encoded(appended: Appended) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(appended, token=secrets.token_hex(8)))


def _write(root: str, sections: Iterable[bytes], lines: int, size: int, tier: int) -> Piece:
    piece = Piece(new_name(root, "piece"), lines, size, tier)
    write_bytes(_location(root, piece), b"".join(sections), unchanging=True)
    return piece


def _merge(root: str, pieces: Sequence[Piece]) -> Piece:
    index, plan, ids, content = (
        [_read(root, piece, section, 0, _size(piece, section)) for piece in pieces]
        for section in (_INDEX, _PLAN, _IDS, _SOURCE)
    )
    in_order = sorted(_id_at(data, place, _ID.size) for data in ids for place in range(len(data) // _ID.size))
    lines = sum(piece.lines for piece in pieces)
    return _write(root, [*index, *plan, *in_order, *content], lines, sum(map(len, content)), pieces[0].tier + 1)


def _id_at(ids: bytes, place: int, length: int = _ID_BYTES) -> bytes:
    return ids[place * _ID.size : place * _ID.size + length]


def _size(piece: Piece, section: _Section) -> int:
    return piece.bytes if section is _SOURCE else piece.lines * section.each


def _location(root: str, piece: Piece) -> str:
    return join(root, _FOLDER, piece.name)


def _read(root: str, piece: Piece, section: _Section, offset: int, length: int) -> bytes:
    reader = open_at(_location(root, piece))
    try:
        return reader.read_at(piece.lines * section.before + offset, length)
    finally:
        reader.close()
