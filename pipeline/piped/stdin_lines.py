"""Lines of stdin as they arrive."""

import os
import select
from collections.abc import Iterator

from jobs.batch.input_files import ArrivingLines, InputLine
from jobs.host import WakeUp
from jobs.protocol.lines import BOM

_READ_BYTES = 1 << 16


class StdinLines:
    """Iterates over groups of non-blank lines; each group has the lines completed by one read.

    It ends at the end of the input, or as soon as `stop` has rung. Memory holds one read and one
    incomplete line; nothing is read while the caller works on a group.
    """

    def __init__(self, descriptor: int, stop: WakeUp) -> None:
        self._descriptor = descriptor
        self._stop = stop
        self._arriving = ArrivingLines()

    def __iter__(self) -> Iterator[list[InputLine]]:
        while (data := self._read()) is not None:
            lines = self._arriving.add(data) if data else self._arriving.end()
            if found := [line for line in map(_without_mark, lines) if line is not None]:
                yield found
            if not data:
                return

    def _read(self) -> bytes | None:
        """Return the available data: b"" at the end, None after `stop`."""
        files: list[int | WakeUp] = [self._descriptor, self._stop]
        readable, _, _ = select.select(files, [], [])
        return None if self._stop in readable else os.read(self._descriptor, _READ_BYTES)


def _without_mark(line: InputLine) -> InputLine | None:
    """Return the first line without its byte order mark; None if it is empty then."""
    if line.number > 1 or line.raw is None or not line.raw.startswith(BOM):
        return line
    raw = line.raw.removeprefix(BOM)
    return line._replace(raw=raw) if raw.strip() else None
