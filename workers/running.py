"""The requests that the engine has: what each step means for them, and which tokens are due to be published."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from jobs.queue import Held
from jobs.requests import Delta, Finished, RequestKey
from jobs.results import ApiError
from jobs.streams import ControlMessage
from workers.engine.async_engine import EngineDeadError
from workers.engine.messages import EngineRequest, Finish, StepOutput
from workers.prepared import Prepared
from workers.requests_in_flight import RequestInFlight

WATCHED_SECONDS = 60.0
"""How long a request counts as watched that was when it was claimed; whoever watches says so again before that."""


class Engine(Protocol):
    """What this needs of `workers.engine.async_engine.AsyncEngine`."""

    def add(self, requests: list[EngineRequest]) -> None: ...

    def abort(self, request_ids: Iterable[int]) -> None: ...


class Outgoing(Protocol):
    """What this needs of `workers.outbox.Outbox`."""

    def accept(self, delta: Delta) -> None: ...

    def finish(self, finished: Finished) -> None: ...

    def tokens_wait(self, first: bool) -> None: ...


class Running:
    """All requests in flight by engine id. Used from the event loop only."""

    def __init__(self, engine: Engine, outgoing: Outgoing, clock: Callable[[], float], stream_interval: float) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self._clock = clock
        self._stream_interval = stream_interval
        self._ids = itertools.count(1)
        self._requests: dict[int, RequestInFlight] = {}
        self._by_key: dict[RequestKey, int] = {}
        self._watched: dict[int, float] = {}  # until when, on the clock
        self._next_sweep = 0.0
        self.finished = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._requests)

    def start(self, prepared: Sequence[Prepared]) -> None:
        """Hands requests to the engine, with what earlier workers generated as a forced beginning."""
        now = self._clock()
        added: list[EngineRequest] = []
        for item in prepared:
            self.drop([item.claim.key])
            request_id = next(self._ids)
            request = RequestInFlight(item, request_id, now + self._stream_interval)
            if item.claim.live:
                self._outgoing.accept(request.accepted())
            ended = request.already_over()
            if ended is not None:
                self._end(ended)
                continue
            self._requests[request_id] = request
            self._by_key[item.claim.key] = request_id
            if item.claim.live or item.claim.watched:
                self._watched[request_id] = math.inf if item.claim.live else now + WATCHED_SECONDS
            added.append(request.engine_request)
        if added:
            with contextlib.suppress(EngineDeadError):  # whoever takes its steps hears of that, and gives all of this up
                self._engine.add(added)

    def reject(self, finished: Sequence[Finished]) -> None:
        """Sends the results of requests that cannot run."""
        for item in finished:
            self._end(item)

    def on_step(self, output: StepOutput) -> None:
        """Gives every request its tokens; ends those that are done."""
        position = 0
        over: list[int] = []
        waiting = first = False
        rows = zip(output.request_ids, output.counts, output.finish, output.stop_token, output.cached_tokens, strict=True)
        for request_id, count, finish, stop_token, cached in rows:
            token_ids = output.token_ids[position : position + count]
            position += count
            request = self._requests.get(request_id)
            if request is None:
                continue
            if cached:
                request.cached_tokens = cached
            stopped = request.take(token_ids, stop_token)
            if finish:
                self._forget(request_id)
                self._end(self._finished(request, Finish(finish), stop_token, output.errors.get(request_id)))
            elif stopped:
                over.append(request_id)
                self._forget(request_id)
                self._end(request.finish("stop", None))
            elif request_id in self._watched and request.fresh_tokens:
                waiting = True
                first = first or request.fresh_tokens == len(request.token_ids)
        self._abort(over)
        if waiting:
            self._outgoing.tokens_wait(first)

    def due(self) -> list[Delta]:
        """What is to be published now: everything of requests that someone watches, of the others once per stream interval."""
        now = self._clock()
        self._watched = {request_id: until for request_id, until in self._watched.items() if until > now}
        deltas = [request.delta() for request in map(self._requests.__getitem__, self._watched) if request.fresh_tokens]
        if now >= self._next_sweep:
            self._next_sweep = now + self._stream_interval / 8
            for request in self._requests.values():
                if request.next_publish <= now and request.fresh_tokens:
                    request.next_publish = now + self._stream_interval
                    deltas.append(request.delta())
        return deltas

    def keys(self) -> list[RequestKey]:
        """All requests in flight."""
        return list(self._by_key)

    def checkpoint(self, keys: Iterable[RequestKey]) -> list[Delta]:
        """Everything of these requests that is not published yet."""
        requests = (self._requests[self._by_key[key]] for key in keys if key in self._by_key)
        return [request.delta() for request in requests if request.fresh_tokens]

    def tokens_left(self) -> dict[RequestKey, int]:
        """How many tokens each request may still get."""
        return {request.claim.key: request.tokens_left for request in self._requests.values()}

    def hopeless(self, before: Mapping[RequestKey, int], times: float) -> list[RequestKey]:
        """Batch requests that at their pace since `before` would need more than `times` as long again to use up their tokens.

        One of them may still end before that by itself; it loses little by going on elsewhere, and a live call's client waits.
        """
        left = self.tokens_left()
        return [key for key, now in left.items() if not key.live and now > max(0, before.get(key, now) - now) * times]

    def watch(self, order: ControlMessage) -> None:
        """Somebody reads the tokens of these requests, or of every request of a batch, for a while."""
        until = self._clock() + order.seconds
        named = set(order.keys)
        for request_id, request in self._requests.items():
            if request.claim.key in named or request.claim.key.batch == order.batch:
                self._watched[request_id] = max(until, self._watched.get(request_id, 0.0))
        self._outgoing.tokens_wait(True)

    def cancel(self, order: ControlMessage) -> list[Held]:
        """Drops the requests that an order names; returns what was held of them."""
        named = set(order.keys)
        return self.drop([key for key in self._by_key if key in named or (order.batch and key.batch == order.batch)])

    def lose(self, held: Iterable[Held]) -> int:
        """Drops requests whose lease another worker may have by now; returns how many were still running."""
        keys = [key for key, fence in held if key in self._by_key and self._requests[self._by_key[key]].claim.fence == fence]
        return len(self.drop(keys))

    def drop(self, keys: Iterable[RequestKey]) -> list[Held]:
        """Stops requests without a result; returns what was held of them."""
        ids = [self._by_key[key] for key in keys if key in self._by_key]
        dropped = [self._forget(request_id) for request_id in ids]
        self._abort(ids)
        return [(request.claim.key, request.claim.fence) for request in dropped]

    def drop_unstarted(self) -> list[Held]:
        """Stops the requests that have no tokens from here yet."""
        return self.drop([request.claim.key for request in self._requests.values() if not request.started])

    def _abort(self, request_ids: list[int]) -> None:
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._engine.abort(request_ids)

    def _finished(self, request: RequestInFlight, finish: Finish, stop_token: int, error: str | None) -> Finished:
        if finish is Finish.STOP:
            return request.finish("stop", request.stop_reason(stop_token), stop_token)
        if finish is Finish.LENGTH:
            return request.finish("length", None)
        return request.fail(ApiError(500, error or "The engine gave this request up.", "server_error", code="engine_error"))

    def _end(self, finished: Finished) -> None:
        self.finished += 1
        self.failed += not finished.result.succeeded
        self._outgoing.finish(finished)

    def _forget(self, request_id: int) -> RequestInFlight:
        request = self._requests.pop(request_id)
        del self._by_key[request.claim.key]
        self._watched.pop(request_id, None)
        return request
