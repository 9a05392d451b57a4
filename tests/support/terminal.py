"""A command on a terminal of its own: what it draws, keys, and a window that changes its size."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.commands import REPOSITORY
from tests.support.waiting import wait_until

_HOME = "\x1b[H"  # begins each frame
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_TIMEOUT = 120


class Terminal:
    """A pseudo-terminal that is the controlling one of the command on it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], columns: int, rows: int) -> None:
        self._ours, self._theirs = pty.openpty()
        self._output = b""
        self._closed = False
        self.resize(columns, rows)
        self.modes_before = self.modes_after = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            cwd=REPOSITORY,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return self._output.decode(errors="replace")

    @property
    def frame(self) -> list[str]:
        """The lines of the last whole frame, without styles."""
        whole = self.output.split(_HOME)[1:-1]
        return [line.rstrip() for line in re.split(r"[\r\n]+", _STYLES.sub("", whole[-1]))] if whole else []

    def wait_for(self, *texts: str) -> list[str]:
        """Wait for a frame that holds all of the texts; return it."""

        def found() -> list[str]:
            frame = self.frame
            return frame if all(any(text in line for line in frame) for text in texts) else []

        wait_until(lambda: found() or self.process.poll() is not None, _TIMEOUT, f"{texts} on the terminal")
        assert self.process.poll() is None, self.output
        return found() or self.wait_for(*texts)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def resize(self, columns: int, rows: int) -> None:
        """As a window does: the system sends SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self) -> int:
        """Wait for the end of the command, and until all that it printed was read; return its exit
        code.
        """
        code = self.process.wait(_TIMEOUT)
        if not self._closed:
            self.modes_after = termios.tcgetattr(self._theirs)
            self._closed = True
            os.close(self._theirs)
            self._thread.join()
            os.close(self._ours)
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
            while chunk := os.read(self._ours, 1 << 16):
                self._output += chunk


@contextmanager
def on_terminal(
    arguments: Sequence[str], environment: dict[str, str], *, columns: int = 80, rows: int = 24
) -> Iterator[Terminal]:
    """Start the command on a terminal; at the end it is killed if it still runs."""
    terminal = Terminal(arguments, environment, columns, rows)
    try:
        yield terminal
    finally:
        terminal.close()
