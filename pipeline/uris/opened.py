"""Inputs that are open, and of which nothing was read."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

GROUP_ROWS = 1 << 13
"""Rows of a table that are in memory together, at most."""


class SourceStamp(msgspec.Struct, frozen=True):
    """Identifies the content of a file."""

    size: int | None
    changed: str
    """Its time of change, or the tag that its server gives it; "" if there is none."""


class OpenSource(NamedTuple):
    """A file that can be read once, from its start."""

    stamp: SourceStamp
    chunks: Iterator[bytes]
