"""Opened inputs, before anything is read."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

GROUP_ROWS = 1 << 13
"""Most rows of a table in memory at once."""


class SourceStamp(msgspec.Struct, frozen=True):
    """Identifies the content of a file."""

    size: int | None
    changed: str
    """Modification time, or the tag from its server; "" if there is none."""


class OpenSource(NamedTuple):
    """A file that can be read once, from its start."""

    stamp: SourceStamp
    chunks: Iterator[bytes]
