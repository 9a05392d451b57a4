"""The lines in the parts of a batch, so that no line is written to a part twice.

They are stored on disk as a bitmap with the names of its parts; for a batch in a bucket, only in
this process. The bitmap may lag behind the manifest or be lost: uncovered parts are read.
"""

import contextlib
import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from jobs.batch.bitmap import Bitmap
from jobs.batch.parts import Part, salvage
from jobs.store.storage import is_local, join

NAME = "stored.lines"
SMALL_BYTES = 256 * 1024
"""Parts with fewer bytes in total are read again instead of being stored here."""

logger = logging.getLogger(__name__)

_MOST_KEPT = 256  # batches, with one bit per line
_kept: OrderedDict[str, bytes] = OrderedDict()
_keeping = threading.Lock()
_HEAD = struct.Struct("<II")  # CRC-32 of the data after the head, bytes of the names


def read_stored(root: str, parts: list[Part], check: Callable[[], None]) -> Bitmap:
    """Return the lines in these parts, calling `check` often.

    Lines read from parts are stored for the next reader, unless they were few. Raise `StoreError`.
    """
    names = {part.name for part in parts}
    covered, lines = _load(root)
    if not covered <= names:  # a part was replaced, perhaps by its readable records
        covered, lines = set(), Bitmap()
    unread = {part.name: part.bytes for part in parts if part.name not in covered}
    for name in sorted(unread):
        for record in salvage(root, name):
            check()
            lines.add(record.line)
    if unread and not are_small(root, unread.values()):
        save_stored(root, parts, lines)
    return lines


def are_small(root: str, sizes: Iterable[int]) -> bool:
    """Return whether parts of these sizes are better read again."""
    return is_local(root) and sum(sizes) < SMALL_BYTES


def save_stored(root: str, parts: list[Part], lines: Bitmap) -> None:
    """Store the lines of these parts for the next reader.

    Not durable: the checksum detects remains of a power loss. A failure does not stop the work.
    """
    names = "\n".join(part.name for part in parts).encode()
    content = names + bytes(lines.bits)
    if not is_local(root):
        _keep(root, _HEAD.pack(zlib.crc32(content), len(names)) + content)
        return
    temporary = join(root, f".{NAME}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_HEAD.pack(zlib.crc32(content), len(names)) + content)
        os.replace(temporary, join(root, NAME))
    except OSError as error:
        logger.warning("failed to write %s; parts will be read again: %s", join(root, NAME), error.strerror or error)


def _keep(root: str, data: bytes) -> None:
    with _keeping:
        _kept[root] = data
        _kept.move_to_end(root)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)


def _load(root: str) -> tuple[set[str], Bitmap]:
    """Return the parts that the file covers and their lines; empty if it is invalid."""
    with contextlib.suppress(OSError, KeyError, struct.error):
        data = Path(root, NAME).read_bytes() if is_local(root) else _kept[root]
        checksum, size = _HEAD.unpack_from(data)
        content = data[_HEAD.size :]
        if zlib.crc32(content) == checksum:
            return set(content[:size].decode().split("\n")) - {""}, Bitmap(content[size:])
    return set(), Bitmap()
