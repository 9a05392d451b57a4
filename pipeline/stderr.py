"""Stderr for commands that go on when it cannot be written: its reader or its terminal may be
gone, or its disk full. And the end of a process whose output cannot be written.
"""

import os
import sys
from contextlib import suppress
from typing import TextIO


class LossyStream:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or as much of it as is taken; return its length."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what is buffered, if that can be written."""
        with suppress(OSError):
            self._stream.flush()

    @property
    def encoding(self) -> str:
        """Its encoding, of which a terminal's characters are chosen."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream.isatty()


def write_line(line: str) -> None:
    """Write a whole line to stderr in one call, since several threads do."""
    stderr = LossyStream(sys.stderr)
    stderr.write(f"{line}\n")
    stderr.flush()


def drop_unwritten() -> None:
    """Drop what stdout and stderr have not taken until now: at its end the interpreter would try
    once more, and exit with 120 in place of this process' own code.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
