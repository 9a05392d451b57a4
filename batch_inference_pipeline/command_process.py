"""A command of the product as a child process of the client."""

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping

from batch_inference_pipeline.command import PARENT_VARIABLE, python_command
from batch_inference_pipeline.errors import ServerFailed

_MOST_RESTARTS = 10
_LINES = 5
_LAST_OUTPUT_SECONDS = 2.0  # to read the rest; a grandchild may keep the output open
_ERROR_PREFIX = "Error: "


class CommandProcess:
    """A process that is restarted when it is killed. If it exits by itself, `check` raises.

    The kernel kills it when the thread that last started it ends.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self._command = python_command("pipeline", *arguments)
        self._environment = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())}
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._restarts = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread()

    def start(self) -> None:
        """Start the process. Raise OSError."""
        self._process = process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
        self._reader = threading.Thread(target=self._read, args=(process,), name="server-log", daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Start the process again if it was killed. Raise `ServerFailed` if it ended by itself."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._reader.join(_LAST_OUTPUT_SECONDS)
        self._process = None
        how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        if code >= 0 or self._restarts == _MOST_RESTARTS:
            error = next((line for line in reversed(self._lines) if line.startswith(_ERROR_PREFIX)), "")
            raise ServerFailed(f"the server does not run: {error.removeprefix(_ERROR_PREFIX) or how}{self.last_lines}")
        self._restarts += 1
        self.start()

    @property
    def last_lines(self) -> str:
        """The process's last output lines, as the end of a sentence; "" without output."""
        lines = [line for line in self._lines if not line.startswith(_ERROR_PREFIX)]
        return f"; its last lines: {' | '.join(lines)}" if lines else ""

    @property
    def has_ended(self) -> bool:
        """Return whether no process is running."""
        return self._process is None or self._process.poll() is not None

    def ask_to_stop(self, at_once: bool) -> None:
        """Ask the process to stop, gracefully or at once; `has_ended` shows when it has."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            if at_once:
                self._process.send_signal(signal.SIGINT)  # the second order of a command

    def end(self) -> None:
        """Kill the process if it is still there, and read the rest of its output."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join(_LAST_OUTPUT_SECONDS)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line.rstrip("\n"))


def _take_interrupts() -> None:
    """Restore the default action of SIGINT, also where the parent ignores the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
