"""Quotes of CSV that do not close, for which its reader takes the rows behind them as one cell."""

import io
import re
from collections.abc import Iterable
from functools import partial

from jobs.batch.input_files import InputError, open_unpacked

_MOST_CHARACTERS = 1 << 26
"""Of a line; no row that can be read is so long."""
_BOM = "\xef\xbb\xbf"
_OPENS = re.compile(r'(?:^|,)"')
_CLOSES = re.compile(r'(?:[^"]|"")*+"')
_ENDS = re.compile(r"[ \t]*(?:[,\r\n]|$)")


def check_quotes(location: str) -> None:
    """Raise `InputError` for a cell that begins with a quote and ends without one, and
    `StoreError`.
    """
    # Any bytes are characters here, so that others than those of UTF-8 are named where they matter
    with io.TextIOWrapper(open_unpacked(location), encoding="latin-1", newline="") as file:
        number = _open_quote(iter(partial(file.readline, _MOST_CHARACTERS), ""))
    if number is not None:
        raise InputError(
            f"{location} has a cell in line {number} that begins with a quote and does not end with one: add the quote"
            " that ends it, and double those inside it"
        )


def _open_quote(lines: Iterable[str]) -> int | None:
    """Return the line of the first quote that is not closed, or is closed in another line before
    text of its cell, which that of a later cell does.
    """
    began: int | None = None
    for number, line in enumerate(lines, 1):
        line, at = line.removeprefix(_BOM) if number == 1 else line, 0
        while began is not None or '"' in line:
            if began is None:
                opened = _OPENS.search(line, at)
                if opened is None:
                    break
                began, at = number, opened.end()
            closed = _CLOSES.match(line, at)
            if closed is None:
                break
            at = closed.end()
            if began < number and not _ENDS.match(line, at):
                return began
            began = None
    return began
