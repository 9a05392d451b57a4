"""The requests that the engine has: what each step means for their choices, and which tokens are due to be published."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jobs.queue import Held
from jobs.requests import Delta, Finished, RequestKey
from jobs.results import ApiError
from jobs.streams import ControlMessage
from workers.engine.async_engine import EngineDeadError
from workers.engine.messages import EngineRequest, Finish, StepOutput
from workers.prepared import Prepared
from workers.requests_in_flight import RequestInFlight
from workers.sequence import Sequence

WATCHED_SECONDS = 60.0
"""How long a request counts as watched that was when it was claimed; whoever watches says so again before that."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much the engine has: requests, and their choices that have not ended, of batches and of live calls."""

    requests: int = 0
    batch: int = 0
    live: int = 0


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
    """All requests in flight, and their choices by engine id. Used from the event loop only."""

    def __init__(self, engine: Engine, outgoing: Outgoing, clock: Callable[[], float], stream_interval: float) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self._clock = clock
        self._stream_interval = stream_interval
        self._ids = itertools.count(1)
        self._sequences: dict[int, tuple[RequestInFlight, Sequence]] = {}
        self._requests: dict[RequestKey, RequestInFlight] = {}
        self._watched: dict[RequestInFlight, float] = {}  # until when, on the clock
        self._next_sweep = 0.0
        self.finished = 0
        self.failed = 0

    def __len__(self) -> int:
        """Choices that have not ended, the engine's unit of work."""
        return len(self._sequences)

    @property
    def load(self) -> Load:
        live = sum(len(request.running) for request in self._requests.values() if request.claim.live)
        return Load(len(self._requests), len(self._sequences) - live, live)

    def start(self, prepared: Iterable[Prepared]) -> None:
        """Hands requests to the engine, with what earlier workers generated as a forced beginning."""
        now = self._clock()
        added: list[EngineRequest] = []
        for item in prepared:
            self.drop([item.claim.key])
            request = RequestInFlight(item, self._ids, now + self._stream_interval)
            if item.claim.live:
                self._outgoing.accept(request.accepted())
            if not request.running:  # what was published is the whole of it
                self._end(request.finish())
                continue
            self._requests[item.claim.key] = request
            self._sequences.update((request_id, (request, sequence)) for request_id, sequence in request.running.items())
            if item.claim.live or item.claim.watched:
                self._watched[request] = math.inf if item.claim.live else now + WATCHED_SECONDS
            added += request.begin()
        self._add(added)

    def reject(self, finished: Iterable[Finished]) -> None:
        """Sends the results of requests that cannot run."""
        for item in finished:
            self._end(item)

    def on_step(self, output: StepOutput) -> None:
        """Gives every choice its tokens; ends what is done."""
        for request_id, items in output.prompt_logprobs.items():
            if request_id in self._sequences:
                self._sequences[request_id][0].take_prompt_logprobs(request_id, items)
        position = 0
        added: list[EngineRequest] = []
        over: list[int] = []
        waiting = first = False
        sequences, watched, logprobs = self._sequences, self._watched, output.logprobs
        rows = zip(output.request_ids, output.counts, output.finish, output.stop_token, output.cached_tokens, strict=True)
        for request_id, count, finish, stop_token, cached in rows:
            token_ids = output.token_ids[position : position + count]
            position += count
            known = sequences.get(request_id)
            if known is None:
                continue
            request, sequence = known
            if cached and not sequence.resumed:
                sequence.cached_tokens = cached
            if request.waiting:
                added += request.follow(request_id)
            stopped = not sequence.ended and sequence.take(token_ids, stop_token, logprobs.get(request_id) if logprobs else None)
            if not finish and not stopped:
                if request in watched:
                    waiting, first = True, first or not request.announced
            elif finish > Finish.LENGTH:
                over += self._forget(request)
                self._end(request.fail(_engine_error(output.errors.get(request_id))))
            else:
                if not finish:
                    over.append(request_id)
                self._end_sequence(request_id, request, sequence, finish == Finish.LENGTH, stop_token)
                waiting = waiting or (request in watched and bool(request.running))
        self._add(added)
        self._abort(over)
        if waiting:
            self._outgoing.tokens_wait(first)

    def due(self) -> list[Delta]:
        """What is to be published now: everything of requests that someone watches, of the others once per stream interval."""
        now = self._clock()
        self._watched = {request: until for request, until in self._watched.items() if until > now}
        deltas = [request.delta() for request in self._watched if request.fresh_tokens]
        if now >= self._next_sweep:
            self._next_sweep = now + self._stream_interval / 8
            for request in self._requests.values():
                if request.next_publish <= now and request.fresh_tokens:
                    request.next_publish = now + self._stream_interval
                    deltas.append(request.delta())
        return deltas

    def keys(self) -> list[RequestKey]:
        """All requests in flight."""
        return list(self._requests)

    def checkpoint(self, keys: Iterable[RequestKey]) -> list[Delta]:
        """Everything of these requests that is not published yet."""
        requests = (self._requests[key] for key in keys if key in self._requests)
        return [request.delta() for request in requests if request.fresh_tokens]

    def all_have(self, tokens: int) -> bool:
        """Whether every request got so many tokens from this engine; those that have ended are not asked for."""
        return all(request.all_have(tokens) for request in self._requests.values())

    def tokens_left(self) -> dict[RequestKey, int]:
        """How many tokens the choice of each request may still get that may get the most."""
        return {key: request.tokens_left for key, request in self._requests.items()}

    def hopeless(self, before: Mapping[RequestKey, int], times: float) -> list[RequestKey]:
        """Batch requests that at their pace since `before` would need more than `times` as long again to use up their tokens.

        One of them may still end before that by itself; it loses little by going on elsewhere, and a live call's client waits.
        """
        left = self.tokens_left()
        return [key for key, now in left.items() if not key.live and now > max(0, before.get(key, now) - now) * times]

    def watch(self, order: ControlMessage) -> None:
        """Somebody reads the tokens of these requests, or of every request of a batch, for a while."""
        until = self._clock() + order.seconds
        for request in self._named(order):
            self._watched[request] = max(until, self._watched.get(request, 0.0))
        self._outgoing.tokens_wait(True)

    def cancel(self, order: ControlMessage) -> list[Held]:
        """Drops the requests that an order names; returns what was held of them."""
        return self.drop([request.claim.key for request in self._named(order)])

    def lose(self, held: Iterable[Held]) -> int:
        """Drops requests whose lease another worker may have by now; returns how many were still running."""
        keys = [key for key, fence in held if key in self._requests and self._requests[key].claim.fence == fence]
        return len(self.drop(keys))

    def drop(self, keys: Iterable[RequestKey]) -> list[Held]:
        """Stops requests without a result; returns what was held of them."""
        dropped = [self._requests[key] for key in keys if key in self._requests]
        self._abort([request_id for request in dropped for request_id in self._forget(request)])
        return [(request.claim.key, request.claim.fence) for request in dropped]

    def drop_unstarted(self) -> list[Held]:
        """Stops the requests that have no tokens from here yet."""
        return self.drop([key for key, request in self._requests.items() if not request.started])

    def _named(self, order: ControlMessage) -> list[RequestInFlight]:
        named = set(order.keys)
        return [request for key, request in self._requests.items() if key in named or (order.batch and key.batch == order.batch)]

    def _add(self, requests: list[EngineRequest]) -> None:
        if requests:
            with contextlib.suppress(EngineDeadError):  # whoever takes its steps hears of that, and gives all of this up
                self._engine.add(requests)

    def _abort(self, request_ids: list[int]) -> None:
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._engine.abort(request_ids)

    def _end_sequence(self, request_id: int, request: RequestInFlight, sequence: Sequence, full: bool, stop_token: int) -> None:
        """Ends one choice, and the request with its last one."""
        if not sequence.ended:
            sequence.end("length" if full else "stop", stop_token)
        del self._sequences[request_id], request.running[request_id]
        if not request.running:
            self._forget(request)
            self._end(request.finish())

    def _end(self, finished: Finished) -> None:
        self.finished += 1
        self.failed += not finished.result.succeeded
        self._outgoing.finish(finished)

    def _forget(self, request: RequestInFlight) -> list[int]:
        """Returns the engine's ids of the choices that have not ended."""
        del self._requests[request.claim.key]
        self._watched.pop(request, None)
        for request_id in request.running:
            del self._sequences[request_id]
        return list(request.running)


def _engine_error(reason: str | None) -> ApiError:
    return ApiError(500, reason or "The engine gave this request up.", "server_error", code="engine_error")
