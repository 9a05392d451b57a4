"""One child process: start it, forward its output, restart it after a growing pause, stop it."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from jobs.process import NAME_VARIABLE, die_with_parent, logs_json
from pipeline.errors import ChildFailed, ChildRefused, Refused

ERROR_PREFIX = "Error: "
_DEATHS_ALLOWED = 12
_DEATH_WINDOW = 60.0
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 8.0
_STOP_POLL = 0.01
_LAST_OUTPUT_SECONDS = 2.0  # to read the rest; a grandchild may keep the output open


class Child:
    """A process that is restarted when it ends.

    `command` is called at each start. `on_death` is called with the process id as soon as the end
    of the process is detected. A `named` child's name is put before each line that it prints, or
    into each line of JSON. The child inherits `descriptors`.

    The kernel kills a child when the thread that started it ends, so only the main thread may call
    `start` and `check`.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        environment: Mapping[str, str],
        say: Callable[[str], None],
        on_death: Callable[[int], None] = lambda pid: None,
        *,
        named: bool = False,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self._prefix = f"{name}: " if named and not logs_json() else ""
        self._command = command
        self._environment = {**os.environ, **environment, **({NAME_VARIABLE: name} if named else {})}
        self._descriptors = descriptors
        self._say = say
        self._on_death = on_death
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._errors: deque[str] = deque(maxlen=5)
        self._last_lines: deque[str] = deque(maxlen=5)
        self._deaths: deque[float] = deque()
        self._start_at: float | None = None
        self._stopping = False
        self.stop_code: int | None = None
        """The exit code of the process after `wait_until_stopped`."""

    @property
    def last_error(self) -> str:
        """Return the last error that the process printed, "" if none."""
        return self._errors[-1] if self._errors else ""

    @property
    def _last_words(self) -> str:
        """Return the last error that the process printed, else its last line."""
        return next(iter([*reversed(self._errors), *reversed(self._last_lines)]), "")

    @property
    def has_stopped(self) -> bool:
        """Return whether `check` has detected the end of a process that was asked to stop."""
        return self._stopping and self._process is None

    @property
    def pid(self) -> int | None:
        """Return the process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def pause_left(self) -> float | None:
        """Return the seconds until the next start, None when none is due."""
        return None if self._start_at is None else max(0.0, self._start_at - time.monotonic())

    def start(self) -> None:
        """Start the process; its output goes to `say`, line by line.

        Raise OSError, RuntimeError or subprocess.SubprocessError if the system cannot start it.
        """
        self._start_at = None
        self._errors.clear()
        self._process = subprocess.Popen(
            self._command(),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=self._descriptors,
            preexec_fn=partial(_prepare, os.getpid()),
        )
        self._reader = threading.Thread(
            target=self._listen, args=(self._process,), name=f"log-{self.name}", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError:  # without a reader, the process would block once the pipe is full
            self._discard()
            raise

    def start_or_retry(self) -> None:
        """Start the process; count a failure as a death, so that `check` tries again after a pause.

        Raises `ChildFailed`.
        """
        try:
            self.start()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            how = f"could not be started ({error})"
            pause = self._count_death(how)
            self._say(f"the {self.name} process {how}; trying again" + _after(pause))

    def start_later(self, seconds: float) -> None:
        """Let `check` start the process after `seconds`, unless it runs already."""
        if self._process is None and not self._stopping:
            self._start_at = time.monotonic() + seconds

    def check(self) -> None:
        """Detect an end, and start the process when its pause is over, unless it is to stop.

        Raises `ChildFailed`.
        """
        if self._process is not None and self._process.poll() is not None:
            if self._stopping:
                self._stopped(self._process)
                return
            self._ended(self._process.returncode)
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self.start_or_retry()

    def ask_to_stop(self) -> None:
        """Send SIGTERM.

        The caller then calls `wait_until_stopped`, or `check` until `has_stopped`.
        """
        self._start_at, self._stopping = None, True
        self._signal(signal.SIGTERM)

    def insist(self) -> None:
        """Send SIGINT after `ask_to_stop`: a supervisor then stops its own children at once."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL. The caller then does the same as after `ask_to_stop`."""
        self._start_at, self._stopping = None, True
        self._signal(signal.SIGKILL)

    def wait_until_stopped(self, deadline: float, insisted: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end; kill the process at `deadline` (monotonic), or once `insisted()`."""
        if self._process is None or self._reader is None:
            return
        while self._process.poll() is None:
            if time.monotonic() > deadline or insisted():
                self._signal(signal.SIGKILL)
                self._process.wait()
                break
            time.sleep(_STOP_POLL)
        self._reader.join(timeout=_LAST_OUTPUT_SECONDS)
        self.stop_code = self._process.returncode
        self._process = None

    def _stopped(self, process: "subprocess.Popen[str]") -> None:
        self._process = None
        if process.returncode < 0:
            self._on_death(process.pid)

    def _ended(self, code: int) -> None:
        assert self._process is not None
        assert self._reader is not None
        pid, self._process = self._process.pid, None
        self._on_death(pid)
        self._reader.join(timeout=_LAST_OUTPUT_SECONDS)
        if code == Refused.exit_code and not self._deaths and self._errors:
            raise ChildRefused(self._errors[-1])
        if code > 0 and "No module named" in self._last_words:
            raise ChildRefused(f"the {self.name} process cannot run: {self._last_words}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        pause = self._count_death(how)
        why = f" ({self._errors[-1]})" if self._errors else ""
        self._say(f"the {self.name} process {how}{why}; restarting it" + _after(pause))

    def _count_death(self, how: str) -> float:
        """Set the time of the next start, and return the seconds until then.

        Raises `ChildFailed`.
        """
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _DEATH_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > _DEATHS_ALLOWED:
            words = self._errors or self._last_lines
            last = f"; its last lines: {' | '.join(words)}" if words else ""
            raise ChildFailed(
                f"the {self.name} process {how} and has ended {len(self._deaths)} times within a minute{last}"
            )
        pause = 0.0 if len(self._deaths) == 1 else min(_FIRST_PAUSE * 2 ** (len(self._deaths) - 2), _LONGEST_PAUSE)
        self._start_at = now + pause
        return pause

    def _discard(self) -> None:
        """End a process that has no reader."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process = self._reader = None

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            line = line.rstrip("\n")
            if line.startswith(ERROR_PREFIX):
                self._errors.append(line.removeprefix(ERROR_PREFIX))
                continue
            self._last_lines.append(line)
            self._say(self._prefix + line)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _after(pause: float) -> str:
    return f" in {pause:.1f} s" if pause else ""


def _prepare(parent: int) -> None:
    """Prepare the child process before its program starts.

    Its own session receives no Ctrl-C. It takes the SIGINT of `insist`, even if the parent ignores
    SIGINT.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
