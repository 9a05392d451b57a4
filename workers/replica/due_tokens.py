"""Decide when generated tokens are due for publishing: at once for requests that a client watches,
once per stream interval for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from workers.replica.in_flight import InFlight

AnyInFlight = InFlight[Any]

WATCHED_SECONDS = 60.0
"""Seconds for which a request watched at claim time counts as watched; its reader renews this in
time.
"""

_SWEEPS_PER_INTERVAL = 8


class Waking(Protocol):
    """The outbox, as seen by `DueTokens`: it is woken and later asks for the tokens."""

    def live_tokens_wait(self) -> None:
        """Wake: live calls have new tokens."""

    def tokens_wait(self, first: bool) -> None:
        """Wake: watched batch requests have new tokens; `first` if these are the first of a
        request.
        """


class DueTokens:
    """Track which requests a client watches, and when the tokens of the others are due."""

    def __init__(self, outbox: Waking, clock: Callable[[], float], stream_interval: float) -> None:
        self._outbox = outbox
        self._clock = clock
        self._stream_interval = stream_interval
        self.watched: dict[AnyInFlight, float] = {}  # end of each watch, on the clock; checked at each step
        self._next_sweep = 0.0

    def begin(self, request: AnyInFlight, now: float) -> None:
        """Record a request if it is a live call, or if a client watched it when it was claimed."""
        if request.publishes and (request.claim.live or request.claim.watched):
            self.watched[request] = math.inf if request.claim.live else now + WATCHED_SECONDS

    def watch(self, requests: Iterable[AnyInFlight], seconds: int) -> None:
        """Record that a client reads the tokens of these requests for `seconds`."""
        until = self._clock() + seconds
        for request in requests:
            if request.publishes:
                self.watched[request] = max(until, self.watched.get(request, 0.0))
        self._outbox.tokens_wait(True)

    def forget(self, request: AnyInFlight) -> None:
        """Remove a request that has ended or was dropped."""
        self.watched.pop(request, None)

    def requests(self, running: Collection[AnyInFlight], live_only: bool) -> list[AnyInFlight]:
        """Return the requests whose tokens are due now.

        Live calls and other watched requests are always due; the other `running` requests are due
        once per stream interval.
        """
        if live_only:
            return [request for request in self.watched if request.claim.live]
        now = self._clock()
        self.watched = {request: until for request, until in self.watched.items() if until > now}
        due = list(self.watched)
        if now >= self._next_sweep:
            self._next_sweep = now + self._stream_interval / _SWEEPS_PER_INTERVAL
            late = [request for request in running if request.next_publish <= now and request.fresh_tokens]
            for request in late:
                request.next_publish = now + self._stream_interval
            due += (request for request in late if request not in self.watched)
        return due

    def announce(self, news: list[AnyInFlight]) -> None:
        """Wake the outbox for new tokens of watched requests."""
        of_batches = [request.announced for request in news if not request.claim.live]
        if len(of_batches) < len(news):
            self._outbox.live_tokens_wait()
        if of_batches:
            self._outbox.tokens_wait(not all(of_batches))
