"""Writing to stderr by commands that continue when it cannot be written.

Its reader or terminal may be gone, or its disk full. The module also ends a process whose output
cannot be written.
"""

import os
import sys
from contextlib import suppress
from typing import TextIO


class LossyStream:
    """A text stream that drops text that cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or the part that can be written; return the length of the text."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer; ignore errors."""
        with suppress(OSError):
            self._stream.flush()

    @property
    def encoding(self) -> str:
        """The stream's encoding, by which rich chooses characters."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()


def write_line(line: str) -> None:
    """Write a line to stderr in one call, since several threads write."""
    stderr = LossyStream(sys.stderr)
    stderr.write(f"{line}\n")
    stderr.flush()


def drop_unwritten() -> None:
    """Drop the unwritten output of stdout and stderr.

    At its end the interpreter would try to write it again, and exit with 120 in place of the
    process's own code.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
