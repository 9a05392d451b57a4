"""A cache of blocks of immutable objects on this machine's disk, with LRU eviction.

An object is identified by its name alone, so that a cached read needs no request.
"""

import contextlib
import errno
import io
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from jobs.host import open_again

BLOCK_BYTES = 1 << 20
_AT_ONCE = 8  # blocks that one request reads
_MOST_BYTES = 4 << 30
_MOST_OBJECTS = 256  # each has an open file

Fetch = Callable[[int, int], tuple[bytes, int]]
"""Returns the bytes of a range, fewer at the end, and the size of the object."""


class BlockCache:
    """The blocks that this process has read; they are removed when it ends. Thread-safe."""

    def __init__(self, most_bytes: int = _MOST_BYTES, most_objects: int = _MOST_OBJECTS) -> None:
        self._most_bytes, self._most_objects = most_bytes, most_objects
        self._changing = threading.Lock()
        self._objects: OrderedDict[str, CachedObject] = OrderedDict()

    def reader(self, name: str, fetch: Fetch) -> "ObjectReader":
        """Return a reader of an object. Raise what `fetch` raises."""
        with self._changing:
            found = self._objects.get(name)
        if found is None:
            begin, size = fetch(0, BLOCK_BYTES)
            found = CachedObject()
            found.keep(0, begin)
            found.size = size
        self.add(name, found)
        return ObjectReader(found.size, partial(found.read_at, fetch))

    def file(self, name: str, buffering: int) -> BinaryIO | None:
        """Return a file with all of an object, or None if some of it is not cached."""
        with self._changing:
            found = self._objects.get(name)
        if found is None or not found.is_whole:
            return None
        with contextlib.suppress(FileNotFoundError):  # systems other than Linux
            return found.open(buffering)
        return None

    def add(self, name: str, found: "CachedObject") -> None:
        """Add an object, and evict those least recently used."""
        with self._changing:
            self._objects[name] = found
            self._objects.move_to_end(name)
            while len(self._objects) > 1 and self._is_full():
                self._objects.popitem(last=False)

    def _is_full(self) -> bool:
        total = sum(one.bytes for one in self._objects.values())
        return len(self._objects) > self._most_objects or total > self._most_bytes


class CachedObject:
    """The cached blocks of one object. Its file has no name, and is removed with the last
    reader.
    """

    def __init__(self) -> None:
        self.size = 0
        self.bytes = 0
        self._file = tempfile.TemporaryFile(prefix="pipeline-")  # noqa: SIM115 - closed when it is collected
        self._present: set[int] = set()
        self._fetching = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """Return whether all of the object is cached."""
        return len(self._present) == -(-self.size // BLOCK_BYTES)

    def open(self, buffering: int) -> BinaryIO:
        """Return an independent file handle. Raise FileNotFoundError."""
        return open_again(self._file, buffering)

    def write(self, data: bytes) -> bool:
        """Append to an object that this process is writing; `size` is its length so far.

        Return whether there was room.
        """
        has_room = self._write(data, self.size)
        self.size += len(data)
        return has_room

    def end(self) -> None:
        """Mark the object as complete."""
        self.bytes = self.size
        self._present.update(range(-(-self.size // BLOCK_BYTES)))

    def read_at(self, fetch: Fetch, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end."""
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        if not self.is_whole and not self._fetch(range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)), fetch):
            return fetch(offset, end)[0]
        return os.pread(self._file.fileno(), end - offset, offset)

    def _fetch(self, blocks: range, fetch: Fetch) -> bool:
        """Fetch the blocks that are not cached; return False if there is no room."""
        if not self._present.issuperset(blocks):
            with self._fetching:
                self._fill(blocks, fetch)
        return self._present.issuperset(blocks)

    def _fill(self, blocks: range, fetch: Fetch) -> None:
        block = blocks.start
        while block < blocks.stop:
            if block in self._present:
                block += 1
                continue
            # Read ahead: files are mostly read from their start.
            last = next((one for one in range(block, block + _AT_ONCE) if one in self._present), block + _AT_ONCE)
            if not self.keep(block, fetch(block * BLOCK_BYTES, min(last * BLOCK_BYTES, self.size))[0]):
                return
            block = last

    def keep(self, block: int, data: bytes) -> bool:
        """Store bytes that begin with a block. Return whether there was room."""
        if not self._write(data, block * BLOCK_BYTES):
            return False
        self.bytes += len(data)
        self._present.update(range(block, block + -(-len(data) // BLOCK_BYTES)))
        return True

    def _write(self, data: bytes, place: int) -> bool:
        try:
            while data:
                written = os.pwrite(self._file.fileno(), data, place)
                data, place = data[written:], place + written
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return not data


class ObjectReader(io.RawIOBase):
    """An object as a file, on top of a function that reads bytes at an offset.

    A failed read raises its OSError, or the error that `fault` makes of it.
    """

    def __init__(self, size: int, read_at: Callable[[int, int], bytes]) -> None:
        self.fault: Callable[[OSError], Exception] | None = None
        self._read_at = read_at
        self._size = size
        self._place = 0

    def read_at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end."""
        try:
            return self._read_at(offset, length)
        except OSError as error:
            if self.fault is None:
                raise
            raise self.fault(error) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self.read_at(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
