"""The screen of `pipeline top`: draw frames until a key or a signal ends it, or print one."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

import redis
from rich.console import Console
from rich.live import Live

from jobs.queue.request_queue import Queue, QueueUnavailable
from pipeline.errors import one_line
from pipeline.progress import duration
from pipeline.signals import Signals
from pipeline.tables import new_console
from pipeline.top.rates import Rates
from pipeline.top.sample import Sample, take_sample
from pipeline.top.sample_thread import SampleThread
from pipeline.top.view import Frame

_SILENCE_SECONDS = 3.0  # beyond the interval, without a sample and without an error
_LONGEST_PAUSE = 1.0


def show_once(queue: Queue, interval: float, server: str) -> None:
    """Print one frame as plain text; its rates are those between two samples."""
    rates = Rates()
    rates.add(take_sample(queue))
    time.sleep(interval)
    sample = take_sample(queue)
    rates.add(sample)
    new_console(color_system=None).print(Frame(sample, rates, server))


def show_live(queue: Queue, interval: float, server: str) -> None:
    """Draw a frame at every sample, every second and when the window changes, until `q` or a signal
    to stop.
    """
    state = _State(server, interval, take_sample(queue))
    # With COLUMNS and LINES, rich would always use the initial size of the window
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    console = Console(markup=False, highlight=False, _environ=environment)
    with (
        Signals() as signals,
        _resizes(),
        _keys() as keys,
        SampleThread(queue, interval) as thread,
        Live(state.frame(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not (signals.stops or _is_quit(keys)):
            state.add(thread.news())
            live.update(state.frame(), refresh=True)
            signals.wait(min(interval, _LONGEST_PAUSE), thread.fileno(), *keys)


def is_terminal() -> bool:
    """Return whether stdout is a terminal that frames can be redrawn on."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class _State:
    """The last sample, and the error if there is no newer one."""

    def __init__(self, server: str, interval: float, first: Sample) -> None:
        self._server = server
        self._patience = interval + _SILENCE_SECONDS
        self._rates = Rates()
        self._error: Exception | None = None
        self._sample = first
        self._rates.add(first)

    def add(self, news: list[Sample | Exception]) -> None:
        """Store new samples and errors of Redis. Raise other errors."""
        for one in news:
            if isinstance(one, Sample):
                self._sample, self._error = one, None
                self._rates.add(one)
            elif isinstance(one, QueueUnavailable | redis.RedisError):
                self._error = one
            else:
                raise one

    def frame(self) -> Frame:
        silence = time.monotonic() - self._sample.taken
        if self._error is None and silence <= self._patience:
            return Frame(self._sample, self._rates, self._server, in_window=True)
        reason = "" if self._error is None else f": {one_line(self._error)}"
        trouble = f"no answer from Redis for {duration(silence)}{reason}"
        return Frame(self._sample, self._rates, self._server, trouble, in_window=True)


@contextlib.contextmanager
def _keys() -> Iterator[tuple[int, ...]]:
    """Yield the file of pressed keys, unbuffered and without echo; none without a terminal.

    A read does not block, since Ctrl-C may have flushed the keys meanwhile.
    """
    if not sys.stdin.isatty():
        yield ()
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    modes = termios.tcgetattr(keys)
    modes[6][termios.VMIN] = 0
    termios.tcsetattr(keys, termios.TCSADRAIN, modes)
    try:
        yield (keys,)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_quit(keys: tuple[int, ...]) -> bool:
    """Return whether `q` was pressed, or the terminal is gone."""
    poll = select.poll()
    for key in keys:
        poll.register(key, select.POLLIN)
    return any(events != select.POLLIN or b"q" in os.read(key, 1024).lower() for key, events in poll.poll(0))


@contextlib.contextmanager
def _resizes() -> Iterator[None]:
    """Let a change of the window's size end the wait for signals."""
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
