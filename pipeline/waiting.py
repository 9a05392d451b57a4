"""Wait for the end of a batch, with its progress on stderr."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pipeline.errors import Interrupted
from pipeline.progress import Counts, make_progress
from pipeline.signals import Signals

T = TypeVar("T")

_FIRST_PAUSE = 0.2
_AWAY_SECONDS = 60.0
_LONGEST_REQUESTED_PAUSE = 60.0


class GracePeriod:
    """A limit of seconds for which a problem is tolerated."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def is_over(self, troubled: bool = True) -> bool:
        """Record whether the problem exists now; return whether it has lasted too long."""
        now = time.monotonic()
        self._since = (self._since or now) if troubled else None
        return self._since is not None and now - self._since > self._seconds

    def reset(self) -> None:
        """Record that the problem does not exist now."""
        self._since = None


def wait_until_ended(
    read: Callable[[], tuple[T, Counts, bool]],
    come_back: str,
    is_passing: Callable[[Exception], bool] = lambda error: False,
    longest_pause: float = _FIRST_PAUSE,
) -> T:
    """Call `read` until it reports the end of the batch, and return what it read.

    `read` returns the batch, its counts for progress, and whether it has ended. It may fail for
    under a minute with errors that are `is_passing`. The pauses between calls grow up to
    `longest_pause` seconds. Raises `Interrupted` with the message `come_back`.
    """
    counts, pause, away = Counts(), _FIRST_PAUSE, GracePeriod(_AWAY_SECONDS)
    with Signals() as signals, make_progress() as progress:
        while True:
            wanted = 0.0
            try:
                batch, counts, ended = read()
            except Exception as error:
                if not is_passing(error) or away.is_over():
                    raise
                wanted = _requested_pause(error)
                progress.update(replace(counts, running=None, note="the server does not answer yet"))
            else:
                away.reset()
                progress.update(counts)
                if ended:
                    return batch
            if signals.stops:
                raise Interrupted(f"Interrupted: {come_back}")
            signals.wait(max(pause, wanted))
            pause = min(1.3 * pause, longest_pause)


def _requested_pause(error: Exception) -> float:
    """Return the seconds of the server's Retry-After header."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    with contextlib.suppress(ValueError):
        return min(float(headers.get("retry-after", 0)), _LONGEST_REQUESTED_PAUSE)
    return 0.0
