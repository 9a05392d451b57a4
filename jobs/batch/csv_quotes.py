"""Detection of unclosed quotes in CSV; Arrow's reader takes all later rows for one cell."""

import re
from functools import partial

from jobs.batch.input_files import InputError, open_unpacked
from jobs.protocol.lines import BOM

_READ_BYTES = 1 << 20
_MOST_BYTES = 1 << 26
"""Longest line in bytes; no readable row is longer."""
_TEXT = rb'[^"]*+(?:"(?<=[^,\r\n]")[^"]*+)*+'  # outside quotes
_QUOTE = rb'"(?<![^,\r\n]")'  # at the start of a cell
_QUOTED = rb'[^"]*+(?:""[^"]*+)*+"'
_END = rb"[ \t]*+(?:[,\r\n]|$)"
_OPENS = re.compile(rb"(?:%b%b%b(?=%b))*+%b%b" % (_TEXT, _QUOTE, _QUOTED, _END, _TEXT, _QUOTE))
"""The next quote that is not closed in the usual way."""
_CLOSES, _ENDS = re.compile(_QUOTED), re.compile(_END)


def check_quotes(location: str) -> None:
    """Raise `InputError` for a cell that begins with a quote and ends without one, and
    `StoreError`.
    """
    check = QuoteCheck(location)
    with open_unpacked(location) as file:
        for data in iter(partial(file.read, _READ_BYTES), b""):
            check.add(data)
    check.end()


class QuoteCheck:
    """Checks CSV that arrives in pieces of any size; holds only the line at a piece's end in
    memory.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._pending = bytearray()
        self._line = 1
        self._began: int | None = None  # line of the open quote
        self._is_bad = False  # whether the open quote is invalid

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # \n may follow a last \r
        self._pending += data[:end] or data
        if end or len(self._pending) > _MOST_BYTES:
            self._look()
            self._pending += data[end or len(data) :]

    def end(self) -> None:
        """Raise `InputError` for the first invalid quote.

        A quote is invalid if it is not closed, or if it is closed in another line, followed by text
        of its cell; a quote of a later cell looks like that.
        """
        self._look()
        if self._began is not None:
            raise InputError(
                f"{self._location} has a cell in line {self._began} that begins with a quote and does not end with"
                " one: add the quote that ends it, and double those inside it"
            )

    def _look(self) -> None:
        block, at = bytes(self._pending), 0
        self._pending.clear()
        if self._line == 1:
            block = block.removeprefix(BOM)
        while not self._is_bad:
            if self._began is None:
                if (opened := _OPENS.match(block, at)) is None:
                    break
                self._began, at = self._pass(block[at : opened.end()]), opened.end()
            if (closed := _CLOSES.match(block, at)) is None:
                break
            is_whole = self._began == self._pass(block[at : closed.end()])
            at = closed.end()
            if not is_whole and not _ENDS.match(block, at):
                self._is_bad = True
                return
            self._began = None
        self._pass(block[at:])

    def _pass(self, part: bytes) -> int:
        """Count the lines that end in a part, and return the offset after it."""
        self._line += part.count(b"\n") + part.count(b"\r") - part.count(b"\r\n")
        return self._line
