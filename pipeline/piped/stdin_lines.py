"""Lines of stdin as they arrive."""

import os
import select
from collections.abc import Iterator

from jobs.batch.input_files import MAX_LINE_BYTES, InputLine
from jobs.protocol.lines import BOM

_READ_BYTES = 1 << 16


class StdinLines:
    """Iterate over groups of lines that are not blank: those that one read completed.

    It ends at the end of the input, or as soon as the file `stop` is readable. One read and the
    line in which it ends are in memory; nothing is read while the caller works on a group.
    """

    def __init__(self, descriptor: int, stop: int) -> None:
        self._descriptor = descriptor
        self._stop = stop
        self._number = 0
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def __iter__(self) -> Iterator[list[InputLine]]:
        while (data := self._read()) is not None:
            *ends, rest = data.split(b"\n")
            lines = [self._ended(end) for end in ends]
            self._add(rest)
            if not data and self._begun_bytes:
                lines.append(self._ended(b""))
            if found := [line for line in lines if line.raw is None or line.raw.strip()]:
                yield found
            if not data:
                return

    def _read(self) -> bytes | None:
        """Return what has arrived, b"" at the end, None once the reading is to stop."""
        readable, _, _ = select.select([self._descriptor, self._stop], [], [])
        return None if self._stop in readable else os.read(self._descriptor, _READ_BYTES)

    def _add(self, piece: bytes) -> None:
        self._begun_bytes += len(piece)
        if piece and self._begun_bytes <= MAX_LINE_BYTES:
            self._begun.append(piece)

    def _ended(self, end: bytes) -> InputLine:
        self._add(end)
        raw = None if self._begun_bytes > MAX_LINE_BYTES else b"".join(self._begun)
        self._number, self._begun, self._begun_bytes = self._number + 1, [], 0
        return InputLine(self._number, 0, raw.removeprefix(BOM) if raw is not None and self._number == 1 else raw)
