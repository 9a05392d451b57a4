"""The order in which a batch's lines run.

Lines that share a prompt prefix run together, and long expected outputs come first. Lines without
generation run in the order of their texts' lengths. Both sorts spill to disk, so that memory grows
by at most 40 bytes per line.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from jobs.protocol.endpoint import BatchEndpoint
from jobs.store.storage import AtomicWriter, StoreError, append_behind

PLAN_NAME = "plan.bin"

_PREFIX_CHARACTERS = (64, 128, 256, 1024, 8192)
"""Lengths at which prompts are compared; a system message longer than the first replaces it.

About 64 characters are a KV block, the least that requests can share.
"""
_SYSTEM_ROLES = ("system", "developer")
_LEVELS = len(_PREFIX_CHARACTERS)
_MAX = 0xFFFFFFFF

_ENTRY = struct.Struct("<IQI")
PLAN_ENTRY_BYTES = _ENTRY.size
# Rank of the model, the prefixes, longest first within, line, offset, length.
_BY_PREFIX = struct.Struct(f">H{_LEVELS}IIIQI")
# Rank of the model, for each prefix (longest in group first, prefix), longest first, line, offset,
# length.
_BY_ORDER = struct.Struct(f">H{2 * _LEVELS}IIIQI")
_RUN_RECORDS = 100_000
_FAN_IN = 24


class PlanEntry(NamedTuple):
    """One line of the source: its number and the range of its bytes."""

    line: int
    offset: int
    length: int


class Sorter:
    """An external sort of records of one size, by their bytes.

    At most `run_records` of them are in memory. Sorted runs are on disk; `_FAN_IN` runs of one size
    are merged into one of the next.
    """

    def __init__(self, record_size: int, folder: Path | None = None, run_records: int = _RUN_RECORDS) -> None:
        self._size = record_size
        self._folder = folder
        self._run_records = run_records
        self._records: list[bytes] = []
        self._levels: list[list[BinaryIO]] = []

    def add(self, record: bytes) -> None:
        """Add one record, in any order. Raise `StoreError`."""
        self._records.append(record)
        if len(self._records) >= self._run_records:
            self._records.sort()
            self._keep(self._write([b"".join(self._records)]), 0)
            self._records = []

    def __iter__(self) -> Iterator[bytes]:
        """Yield all records in order; may be repeated, but not concurrently."""
        self._records.sort()
        runs = [run for level in self._levels for run in level]
        return heapq.merge(self._records, *map(self._read, runs)) if runs else iter(self._records)

    def close(self) -> None:
        """Release memory and disk."""
        self._records = []
        for level in self._levels:
            _close(level)
        self._levels = []

    def _keep(self, run: BinaryIO, level: int) -> None:
        if level == len(self._levels):
            self._levels.append([])
        runs = self._levels[level]
        runs.append(run)
        if len(runs) == _FAN_IN:
            merged = self._write(heapq.merge(*map(self._read, runs)))
            _close(runs)
            runs.clear()
            self._keep(merged, level + 1)

    def _write(self, pieces: Iterable[bytes]) -> BinaryIO:
        try:
            run = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by `close`
            run.writelines(pieces)
            run.flush()
        except OSError as error:
            raise StoreError(
                f"cannot sort in {self._folder or tempfile.gettempdir()}: {error.strerror or error}"
            ) from error
        return cast(BinaryIO, run)

    def _read(self, run: BinaryIO) -> Iterator[bytes]:
        run.seek(0)
        chunk_size = self._size * 4096
        while chunk := run.read(chunk_size):
            for start in range(0, len(chunk), self._size):
                yield chunk[start : start + self._size]


def _close(runs: list[BinaryIO]) -> None:
    for run in runs:
        run.close()


class PlanBuilder:
    """Builds the plan from every line, added once, in any order.

    `by_model` puts all lines of one model before those of the next.
    """

    def __init__(self, folder: Path | None = None, run_records: int = _RUN_RECORDS, *, by_model: bool = False) -> None:
        self._folder = folder
        self._by_model = by_model
        self._turns: dict[str, int] = {}
        self._run_records = run_records
        self._by_prefix = Sorter(_BY_PREFIX.size, folder, run_records)
        self.lines = 0

    def add(self, entry: PlanEntry, endpoint: BatchEndpoint, model: str, body: dict[str, Any]) -> bytes:
        """Add one line; return its sort key by prefix.

        `body` may be anything, since only the worker validates it.
        """
        hashes = prefix_hashes(model, list(endpoint.prefix_texts(body)))
        rest = _MAX - min(endpoint.expected_length(body), _MAX)
        turn = self._turns.setdefault(model, len(self._turns)) if self._by_model else 0
        record = _BY_PREFIX.pack(turn, *hashes, rest, *entry)
        self._by_prefix.add(record)
        self.lines += 1
        return record

    def write(self, location: str) -> str:
        """Write the plan file durably and return its hash. Raise `StoreError`."""
        with AtomicWriter(location, unchanging=True) as writer:
            for entry in self.ordered():
                writer.write(_ENTRY.pack(*entry))
            writer.commit()
            return writer.sha256

    def ordered(self) -> Iterator[PlanEntry]:
        """Yield the lines in the plan's order, once. Raise `StoreError`."""
        longest = self._longest_by_group()
        ordered = Sorter(_BY_ORDER.size, self._folder, self._run_records)
        try:
            for record, maxima in zip(self._by_prefix, _expand(longest), strict=True):
                turn, *fields = _BY_PREFIX.unpack(record)
                groups = chain.from_iterable(zip(maxima, fields, strict=False))
                ordered.add(_BY_ORDER.pack(turn, *groups, *fields[_LEVELS:]))
            self._by_prefix.close()
            for record in ordered:
                *_, line, offset, length = _BY_ORDER.unpack(record)
                yield PlanEntry(line, offset, length)
        finally:
            ordered.close()

    def close(self) -> None:
        """Release memory and disk."""
        self._by_prefix.close()

    def _longest_by_group(self) -> list[tuple[array[int], array[int]]]:
        """Return per prefix length the number of lines in each group and its longest expected
        output.

        Groups are in the order of the first sort.
        """
        groups = [(array("I"), array("I")) for _ in range(_LEVELS)]
        previous: list[int] = []
        for record in self._by_prefix:
            _, *prefixes, rest = _BY_PREFIX.unpack_from(record)[: _LEVELS + 2]
            for level, (counts, longest) in enumerate(groups):
                if prefixes[: level + 1] != previous[: level + 1]:
                    counts.append(1)
                    longest.append(rest)
                else:
                    counts[-1] += 1
                    longest[-1] = min(longest[-1], rest)
            previous = prefixes
        return groups


def _expand(groups: list[tuple[array[int], array[int]]]) -> Iterator[tuple[int, ...]]:
    """Repeat the groups' values for each of their lines."""
    return zip(*(_repeat(counts, values) for counts, values in groups), strict=True)


def _repeat(counts: array[int], values: array[int]) -> Iterator[int]:
    for count, value in zip(counts, values, strict=True):
        for _ in range(count):
            yield value


def prefix_hashes(model: str, pieces: list[str]) -> tuple[int, ...]:
    """Return a hash per prefix length; equal ones mean a shared prefix.

    A collision costs only a little speed.
    """
    text = "".join(pieces)[: _PREFIX_CHARACTERS[-1]]
    value = zlib.crc32(model.encode(errors="surrogatepass"))
    hashes: list[int] = []
    start = 0
    for length in _PREFIX_CHARACTERS:
        if not hashes and len(pieces) > 1 and len(pieces[0]) > length and pieces[0].startswith(_SYSTEM_ROLES):
            hashes.append(zlib.crc32(pieces[0].encode(errors="surrogatepass"), value))
            continue
        value = zlib.crc32(text[start:length].encode(errors="surrogatepass"), value)
        hashes.append(value)
        start = length
    return tuple(hashes)


def append_plan(location: str, lines: int, entries: Iterable[PlanEntry], durable: bool = True) -> None:
    """Write entries after the first `lines` of a plan file. Raise `StoreError`."""
    append_behind(location, lines * _ENTRY.size, plan_bytes(entries), durable)


def plan_bytes(entries: Iterable[PlanEntry]) -> bytes:
    """Return entries in the format of a plan file."""
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def read_plan(file: BinaryIO, start: int, count: int) -> list[PlanEntry]:
    """Return entries `start` to `start + count` of a plan file, fewer at its end."""
    file.seek(start * _ENTRY.size)
    data = file.read(count * _ENTRY.size)
    return [PlanEntry(*fields) for fields in _ENTRY.iter_unpack(data)]
