"""Progress of a batch on stderr: a live bar on a terminal, else a plain line every few seconds.

Output that cannot be written is dropped.
"""

import sys
import time
from dataclasses import dataclass
from typing import IO, Protocol, Self, cast

from pipeline.stderr import LossyStream, write_line

_PLAIN_EVERY = 5.0
_RATE_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a batch at one moment.

    `tokens` are output tokens. `note` says why the batch waits, if it does. `running` is None if
    the source does not report it.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    running: int | None = 0
    tokens: int = 0
    note: str = ""

    @property
    def waiting(self) -> int:
        return max(0, self.total - self.done - (self.running or 0))


class Rate:
    """Computes tokens per second over the last ten seconds, and the seconds left at the rate of
    the requests.

    Time before the first running request does not count. If counts fall, since Redis lost some,
    the earlier samples are dropped.
    """

    def __init__(self) -> None:
        self._readings: list[tuple[float, Counts]] = []

    def add(self, counts: Counts, now: float) -> None:
        idle = not (counts.running or counts.done or counts.tokens)
        if self._readings and (idle or counts.done < self._readings[-1][1].done):
            self._readings.clear()
        self._readings.append((now, counts))
        while len(self._readings) > 2 and now - self._readings[1][0] > _RATE_WINDOW:
            self._readings.pop(0)

    @property
    def tokens_per_second(self) -> float:
        seconds, counts = self._span()
        return max(0, counts.tokens) / seconds if seconds > 0 else 0.0

    @property
    def done_per_second(self) -> float | None:
        """Requests per second; None before the second sample."""
        seconds, counts = self._span()
        return counts.done / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        seconds, counts = self._span()
        if seconds <= 0 or counts.done <= 0:
            return None
        last = self._readings[-1][1]
        return (last.total - last.done) * seconds / counts.done

    def _span(self) -> tuple[float, Counts]:
        if not self._readings:
            return 0.0, Counts()
        (begun, first), (ended, last) = self._readings[0], self._readings[-1]
        return ended - begun, Counts(done=last.done - first.done, tokens=last.tokens - first.tokens)


class Progress(Protocol):
    """Shows a command's progress, and prints lines meanwhile."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, counts: Counts) -> None: ...
    def say(self, line: str) -> None: ...


def make_progress() -> Progress:
    """Return a progress bar if stderr is a terminal, else plain lines."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


class PlainProgress(Progress):
    """Prints a line after a change: at once for a new note, else every few seconds."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._last_line = ""
        self._last_note = ""
        self._last_time = 0.0

    def update(self, counts: Counts) -> None:
        now = time.monotonic()
        self._rate.add(counts, now)
        line = describe(counts, self._rate)
        if line == self._last_line or (counts.note == self._last_note and now - self._last_time < _PLAIN_EVERY):
            return
        self._last_line, self._last_note, self._last_time = line, counts.note, now
        self.say(line)

    def say(self, line: str) -> None:
        write_line(line)


class BarProgress(Progress):
    """A bar that rich redraws in place; lines and log records scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._rate = Rate()
        columns = BarColumn(bar_width=30), TextColumn("{task.description}")
        stderr = cast(IO[str], LossyStream(sys.stderr))  # an error would end rich's thread
        self._bar = RichProgress(*columns, console=Console(file=stderr), refresh_per_second=5)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.refresh()
        self._bar.stop()

    def update(self, counts: Counts) -> None:
        self._rate.add(counts, time.monotonic())
        line = describe(counts, self._rate)
        self._bar.update(self._task, total=counts.total or None, completed=counts.done, description=line)

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe(counts: Counts, rate: Rate) -> str:
    """Return one line: done, running, waiting, tokens/s and time left, or the note.

    The note is shown while no request runs.
    """
    if counts.note and not counts.running:
        return f"{counts.done} of {counts.total} done; {counts.note}" if counts.done else counts.note
    parts = [f"{counts.done} done", f"{counts.running} running", f"{counts.waiting} waiting"]
    if counts.running is None:
        parts = [f"{counts.done} of {counts.total} done"]
    if counts.failed:
        parts.insert(1, f"{counts.failed} of them failed")
    if rate.tokens_per_second or counts.running:
        parts.append(f"{rate.tokens_per_second:,.0f} tokens/s")
    if counts.done < counts.total and (left := rate.seconds_left) is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return the seconds as `12 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
