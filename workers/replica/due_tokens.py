"""Which requests' tokens are due to be published: those that a client watches, and at times the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from workers.replica.in_flight import InFlight

AnyInFlight = InFlight[Any]

WATCHED_SECONDS = 60.0
"""How long a request counts as watched that was when it was claimed; its reader says so again
before that.
"""

_SWEEPS_PER_INTERVAL = 8


class Waking(Protocol):
    """What sends tokens, and asks for them when it does."""

    def live_tokens_wait(self) -> None:
        """Live calls have new tokens."""

    def tokens_wait(self, first: bool) -> None:
        """Watched requests of batches have new tokens, the first ones of some of them."""


class DueTokens:
    """The requests that a client watches, and when the tokens of the others are due."""

    def __init__(self, outbox: Waking, clock: Callable[[], float], stream_interval: float) -> None:
        self._outbox = outbox
        self._clock = clock
        self._stream_interval = stream_interval
        self.watched: dict[AnyInFlight, float] = {}  # until when, on the clock; a step looks at it
        self._next_sweep = 0.0

    def begin(self, request: AnyInFlight, now: float) -> None:
        """Note a request that a client watches when it was claimed, if one does."""
        if request.publishes and (request.claim.live or request.claim.watched):
            self.watched[request] = math.inf if request.claim.live else now + WATCHED_SECONDS

    def watch(self, requests: Iterable[AnyInFlight], seconds: int) -> None:
        """A client reads the tokens of these requests for a while."""
        until = self._clock() + seconds
        for request in requests:
            if request.publishes:
                self.watched[request] = max(until, self.watched.get(request, 0.0))
        self._outbox.tokens_wait(True)

    def forget(self, request: AnyInFlight) -> None:
        """A request has left."""
        self.watched.pop(request, None)

    def requests(self, running: Collection[AnyInFlight], live_only: bool) -> list[AnyInFlight]:
        """Return those that are due now: live calls and others that a client watches, the rest of
        the `running` ones once per stream interval.
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
        """Have new tokens of requests sent that a client watches."""
        of_batches = [request.announced for request in news if not request.claim.live]
        if len(of_batches) < len(news):
            self._outbox.live_tokens_wait()
        if of_batches:
            self._outbox.tokens_wait(not all(of_batches))
