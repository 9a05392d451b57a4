"""Track the requests in the engine, and apply each step's output to their choices."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from jobs.protocol.requests import Claim, Delta, Finished, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Held
from jobs.queue.streams import ControlMessage
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError
from workers.engine.messages.core import EngineRequest, Finish, StepOutput
from workers.replica.due_tokens import AnyInFlight, DueTokens
from workers.replica.duplicates import Copy, Digest, Duplicates
from workers.replica.grammars import Grammar, Grammars
from workers.replica.in_flight import EngineSequence
from workers.replica.metrics import RequestMetrics
from workers.replica.outbox import Outbox
from workers.replica.pooling_in_flight import PoolingInFlight, PreparedPooling
from workers.replica.prepared import Prepared
from workers.replica.requests_in_flight import RequestInFlight, rejected
from workers.replica.tracing import RequestTraces

logger = logging.getLogger(__name__)

CALL_PLACES = 8
"""Most places that a live call takes in a worker's intake, so that no call's choices stop it."""

_GROUP = 32
"""Most requests whose tokens are published together: the next group is prepared while Redis and the
API processes handle one.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load: requests and unfinished choices, of batches and of live calls, and the
    tokens of pooling inputs.

    `tenants` has the places that each tenant's live calls take, by the tenant's mark, divided by
    its weight. A call takes a place for each choice, but at most `CALL_PLACES`.
    """

    requests: int = 0
    batch: int = 0
    live: int = 0
    pooled_tokens: int = 0
    live_places: int = 0
    tenants: Mapping[str, float] = field(default_factory=dict)


class Running:
    """Hold the unfinished requests of one engine core, and their choices by engine id.

    Use from the event loop only.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        outbox: Outbox,
        grammars: Grammars,
        clock: Callable[[], float],
        stream_interval: float,
        traces: RequestTraces | None = None,
        suspects: set[Digest] | None = None,
    ) -> None:
        """Create the state of one core; `suspects` is passed to `Duplicates`."""
        self._traces = traces
        self._engine = engine
        self._outbox = outbox
        self._grammars = grammars
        self._clock = clock
        self._stream_interval = stream_interval
        self._due = DueTokens(outbox, clock, stream_interval)
        self._duplicates = Duplicates(self._repeat, self._start_copy, suspects)
        self._ids = itertools.count(1)
        self._sequences: dict[int, tuple[AnyInFlight, EngineSequence]] = {}
        self._requests: dict[RequestKey, AnyInFlight] = {}
        self._without_grammar: set[AnyInFlight] = set()  # grammars still compiling
        self._last_step = math.nan  # time of the last step, on the clock
        self._step_number = 0  # the engine's step number
        self.room_made: Callable[[], None] = lambda: None  # called when requests end without a step
        self.metrics = RequestMetrics()
        self.steps = 0
        self.copied_tokens = 0  # output tokens of copies
        self.finished = 0
        self.failed = 0

    @property
    def num_sequences(self) -> int:
        """Return the number of unfinished choices, the engine's unit of work."""
        return len(self._sequences)

    def any(self) -> bool:
        """Return whether any choice is unfinished."""
        return bool(self._sequences)

    @property
    def is_watched(self) -> bool:
        """Return whether a client watches a request."""
        return bool(self._due.watched)

    @property
    def load(self) -> Load:
        live = places = tokens = 0
        tenants: dict[str, float] = {}
        for request in self._requests.values():
            tokens += request.pooled_tokens
            if request.share is not None:
                choices = len(request.running)
                live += choices
                places += min(choices, CALL_PLACES)
                mark, weight = request.share.tenant, request.share.weight
                tenants[mark] = tenants.get(mark, 0.0) + min(choices, CALL_PLACES) / weight
        return Load(len(self._requests), len(self._sequences) - live, live, tokens, places, tenants)

    def prepared(self, digest: Digest) -> Prepared | None:
        """Return the prepared duplicate; see `Duplicates.prepared`."""
        return self._duplicates.prepared(digest)

    def start(self, prepared: Iterable[Prepared]) -> None:
        """Pass requests to the engine, with the output of earlier workers as a forced beginning."""
        now = self._clock()
        added: list[EngineRequest] = []
        for item in prepared:
            self.drop([item.claim.key])
            if not self._duplicates.take(item, now):
                added += self._begin_or_end(item, now)
        self._add(added)

    def reject(self, finished: Iterable[Finished]) -> None:
        """Send the results of requests that cannot run."""
        for item in finished:
            self._end(item)

    def on_step(self, output: StepOutput) -> None:
        """Give every choice its tokens; end the finished ones."""
        self.steps += 1
        before, now = self._last_step, self._clock()
        self._last_step, self._step_number = now, output.step
        position = steady = generated = 0
        added: list[EngineRequest] = []
        over: list[int] = []
        news: list[AnyInFlight] = []
        sequences, watched, logprobs, pooled = self._sequences, self._due.watched, output.logprobs, output.pooled
        rows = zip(
            output.request_ids, output.counts, output.finish, output.stop_token, output.cached_tokens, strict=True
        )
        for request_id, count, finish, stop_token, cached in rows:
            token_ids = output.token_ids[position : position + count]
            position += count
            known = sequences.get(request_id)
            if known is None:
                continue
            request, sequence = known
            generated += count
            if sequence.last_token == before:
                steady += count
            else:
                added += self._late_token(output, request_id, count, cached, now)
            sequence.last_token = now
            try:
                if output.prompt_logprobs and request_id in output.prompt_logprobs:
                    request.take_prompt_logprobs(request_id, output.prompt_logprobs[request_id])
                if pooled and request_id in pooled:
                    request.take_pooled(request_id, pooled[request_id])
                    self._count_prompt(sequence, cached)
                stopped = not sequence.ended and sequence.take(
                    token_ids, stop_token, logprobs.get(request_id) if logprobs else None
                )
                if finish or stopped:
                    sequence.device_seconds = output.device_seconds.get(request_id, 0.0)
                    over += self._end_choice(request_id, finish, stop_token, output.errors.get(request_id))
                if request in watched and request.running:
                    news.append(request)
            except Exception as error:
                over += self._fail(request, _unforeseen(request.claim, error))
        self.metrics.generation_tokens.add(generated)
        if steady:
            self.metrics.inter_token_latency.observe(now - before, count=steady)
        self._add(added)
        self._abort(over)
        self._due.announce(news)

    def due(self, live_only: bool) -> Iterator[list[Delta]]:
        """Yield the deltas to publish now, in groups.

        Live calls and watched requests are always due, the others once per stream interval.
        """
        requests = self._due.requests(self._requests.values(), live_only)
        for begin in range(0, len(requests), _GROUP):
            yield self._deltas(requests[begin : begin + _GROUP])

    def keys(self) -> list[RequestKey]:
        """Return the keys of all requests in flight, waiting copies included."""
        return [*self._requests, *self._duplicates.waiting()]

    def keys_in_engine(self) -> list[RequestKey]:
        """Return the keys of all requests in flight, without copies and those that wait for a
        grammar.
        """
        return [key for key, request in self._requests.items() if request not in self._without_grammar]

    def longest(self) -> int:
        """Return the tokens of the longest choice, prompt included, or 0 without any."""
        return max((sequence.length for _, sequence in self._sequences.values()), default=0)

    def checkpoint(self, keys: Iterable[RequestKey]) -> list[Delta]:
        """Return the unpublished part of these requests."""
        return self._deltas(self._requests[key] for key in keys if key in self._requests)

    def all_have(self, tokens: int) -> bool:
        """Return whether every unfinished request got at least `tokens` tokens from this engine."""
        return all(request.all_have(tokens) for request in self._requests.values())

    def tokens_left(self) -> dict[RequestKey, int]:
        """Return the largest number of tokens that any choice of each request may still get."""
        return {key: request.tokens_left for key, request in self._requests.items()}

    def watch(self, order: ControlMessage) -> None:
        """Record that a client reads the tokens of these requests, or of a whole batch, for a
        while.
        """
        keys = self._named(order)
        for key in keys:
            if (copy := self._duplicates.claim(key)) is not None:
                copy.watched = True  # applies from its start, if it becomes the original
        self._due.watch([self._requests[key] for key in keys if key in self._requests], order.seconds)

    def cancel(self, order: ControlMessage) -> list[Held]:
        """Drop the requests named in a control message; return their leases."""
        if order.batch:
            self._duplicates.forget_batch(order.batch)
        return self._cancel(self._named(order))

    def lose(self, held: Iterable[Held]) -> int:
        """Drop requests whose leases another worker may hold; return how many were still
        running.
        """
        keys = [key for key, fence in held if (claim := self._claim(key)) is not None and claim.fence == fence]
        return len(self._cancel(keys))

    def drop(self, keys: Iterable[RequestKey], why: str = "requeued") -> list[Held]:
        """Stop requests without a result; return their leases. `why` is for traces."""
        dropped = [claim for key in dict.fromkeys(keys) if (claim := self._claim(key)) is not None]
        running = [self._requests[claim.key] for claim in dropped if claim.key in self._requests]
        self._abort([request_id for request in running for request_id in self._forget(request)])
        for claim in dropped:
            self._duplicates.leave(claim.key)
            if self._traces is not None:
                self._traces.dropped(claim, why)
        return [(claim.key, claim.fence) for claim in dropped]

    def suspect(self, keys: Iterable[RequestKey]) -> None:
        """Record the requests that the engine core had when it crashed."""
        self._duplicates.suspect(keys)

    def drop_unstarted(self) -> list[Held]:
        """Stop the requests without tokens from this worker, and copies; return their leases."""
        unstarted = [key for key, request in self._requests.items() if not request.started]
        return self.drop([*unstarted, *self._duplicates.waiting()])

    def _cancel(self, keys: Iterable[RequestKey]) -> list[Held]:
        """Drop requests for good; each of their running choices counts as aborted."""
        before = len(self._sequences)
        held = self.drop(keys, "cancelled or lost")
        self.metrics.finished.add(before - len(self._sequences), "abort")
        return held

    def _named(self, order: ControlMessage) -> list[RequestKey]:
        of_batch = [key for key in self.keys() if key.batch == order.batch] if order.batch else []
        return list(dict.fromkeys([*order.keys, *of_batch]))

    def _claim(self, key: RequestKey) -> Claim | None:
        """Return the claim of a request in flight."""
        request = self._requests.get(key)
        return self._duplicates.claim(key) if request is None else request.claim

    def _add(self, requests: list[EngineRequest]) -> None:
        if requests:
            # The task that takes the engine's steps gets the same error and ends the replica
            with contextlib.suppress(EngineDeadError):
                self._engine.add(requests)

    def _abort(self, request_ids: list[int]) -> None:
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._engine.abort(request_ids)

    def _begin_or_end(self, item: Prepared, now: float) -> list[EngineRequest]:
        """Start a request as `_begin` does; a failure ends it with an error."""
        try:
            return self._begin(item, now)
        except Exception as error:
            self._end(rejected(item.claim, _unforeseen(item.claim, error)))
            self._duplicates.leave(item.claim.key, failed=True)
            self.drop([item.claim.key])
            return []

    def _start_copy(self, item: Prepared) -> None:
        """Run a copy whose original ended without an answer."""
        added = self._begin_or_end(item, self._clock())
        try:
            self._add(added)
        except Exception as error:
            self._fail(self._requests[item.claim.key], _unforeseen(item.claim, error))

    def _repeat(self, request: AnyInFlight, copy: Copy) -> None:
        """Give a copy the answer of a finished request."""
        try:
            finished = request.repeat(copy.claim, copy.arrived)
        except Exception as error:
            self._end(rejected(copy.claim, _unforeseen(copy.claim, error)))
            return
        self.metrics.duplicates.add(1)
        self.copied_tokens += finished.result.usage.completion_tokens
        self._complete(request, finished)

    def _begin(self, item: Prepared, now: float) -> list[EngineRequest]:
        """Return the engine requests of a request to start now.

        There are none if its checkpoint is already complete, or if its grammar is still compiling.
        """
        claim, request = item.claim, self._in_flight(item, now)
        if not request.running and not request.try_again(self._ids):
            self._accept(request)
            self._complete(request, request.finish())
            return []
        self._requests[claim.key] = request
        self._register(request)
        self._due.begin(request, now)
        wanted = item.output_format
        grammar = "" if wanted is None else self._grammars.lookup(wanted)
        if wanted is not None and grammar is None:
            self._without_grammar.add(request)
            self._grammars.compile(wanted, partial(self._take_grammar, request))
            return []
        return self._enter(request, grammar or "")

    def _in_flight(self, item: Prepared, now: float) -> AnyInFlight:
        if isinstance(item, PreparedPooling):
            return PoolingInFlight(item, self._ids, now)
        return RequestInFlight(item, self._ids, now, self._stream_interval)

    def _register(self, request: AnyInFlight) -> None:
        self._sequences.update((request_id, (request, sequence)) for request_id, sequence in request.running.items())

    def _take_grammar(self, request: AnyInFlight, grammar: Grammar) -> None:
        """Continue a request whose grammar was compiled, if it is still in flight."""
        if request not in self._without_grammar:
            return
        self._without_grammar.discard(request)
        try:
            self._add(self._enter(request, grammar))
        except Exception as error:
            self._fail(request, _unforeseen(request.claim, error))
        if isinstance(grammar, ApiError):
            self.room_made()

    def _enter(self, request: AnyInFlight, grammar: Grammar) -> list[EngineRequest]:
        """Accept a request and return its engine requests; end it if its grammar is an error."""
        if isinstance(grammar, ApiError):
            self._fail(request, grammar)
            return []
        self._accept(request)
        added = request.begin(grammar)
        if self._traces is not None:
            self._traces.entered(request.claim, added)
        return added

    def _accept(self, request: AnyInFlight) -> None:
        if request.claim.live:
            accept = self._outbox.accept if request.publishes else self._outbox.accept_later
            accept(request.accepted())

    def _late_token(
        self, output: StepOutput, request_id: int, count: int, cached: int, now: float
    ) -> list[EngineRequest]:
        """Record a choice's first token from this worker, or its first after steps without one;
        return the engine requests to start then.
        """
        metrics, (request, sequence) = self.metrics, self._sequences[request_id]
        if self._traces is not None:
            is_first = bool(count and not sequence.last_token)
            self._traces.late_token(request.claim, output, request_id, is_first)
        if count and sequence.last_token:
            metrics.inter_token_latency.observe(now - sequence.last_token)
        elif count and not sequence.resumed:
            self._count_prompt(sequence, cached)
            metrics.time_to_first_token.observe(now - request.arrived, request.kind)
        return request.follow(request_id)

    def _count_prompt(self, sequence: EngineSequence, cached: int) -> None:
        self.metrics.prompt_tokens.add(sequence.prompt_length)
        self.metrics.cached_tokens.add(cached)
        sequence.cached_tokens = cached or sequence.cached_tokens

    def _deltas(self, requests: Iterable[AnyInFlight]) -> list[Delta]:
        deltas: list[Delta] = []
        for request in [request for request in requests if request.fresh_tokens]:
            try:
                deltas.append(request.delta())
            except Exception as error:
                self._abort(self._fail(request, _unforeseen(request.claim, error)))
        return deltas

    def _fail(self, request: AnyInFlight, error: ApiError) -> list[int]:
        """End a request with an error; return the engine ids to abort."""
        self.metrics.finished.add(len(request.sequences), "error")
        left = self._forget(request)
        self._duplicates.leave(request.claim.key, failed=True)
        self._end(rejected(request.claim, error))
        return left

    def _end_choice(self, request_id: int, finish: int, stop_token: int, error: str | None) -> list[int]:
        """End one choice, and its request if it is the last one or failed. Return the engine ids to
        abort.
        """
        request, sequence = self._sequences[request_id]
        if finish > Finish.LENGTH:
            reason = error or "The engine ended this request without a reason."
            if finish == Finish.INVALID:
                return self._fail(request, ApiError(400, reason, code="invalid_value"))
            if finish == Finish.NOT_FINITE:
                return self._fail(request, _not_finite(request.claim, reason, self._engine.info.dtype))
            return self._fail(request, ApiError(500, reason, "server_error", code="engine_error"))
        if not sequence.ended:
            sequence.end("length" if finish == Finish.LENGTH else "stop", stop_token)
        del self._sequences[request_id], request.running[request_id]
        if not request.running and request.try_again(self._ids):
            self._register(request)
            self._add(request.begin(request.grammar))
        elif not request.running:
            finished = request.finish()
            self._forget(request)
            self._complete(request, finished)
        return [] if finish else [request_id]

    def _complete(self, request: AnyInFlight, finished: Finished) -> None:
        metrics, latency = self.metrics, self._clock() - request.arrived
        for sequence in request.sequences:
            metrics.finished.add(1, sequence.finish_reason)
            metrics.prompt_length.observe(sequence.prompt_length)
            metrics.output_length.observe(len(sequence.token_ids))
            metrics.latency.observe(latency, request.kind)
        self._duplicates.answered(request, finished)
        self._end(finished)

    def _end(self, finished: Finished) -> None:
        self.finished += 1
        if self._traces is not None:
            self._traces.ended(finished)
        if not finished.result.succeeded:
            self.failed += 1
            self.metrics.count_error(finished.result)
        self._outbox.finish(finished)

    def _forget(self, request: AnyInFlight) -> list[int]:
        """Return the engine ids of the unfinished choices in the engine."""
        if self._traces is not None:
            self._traces.left(request, self._step_number)
        del self._requests[request.claim.key]
        self._due.forget(request)
        for request_id in request.running:
            del self._sequences[request_id]
        if request in self._without_grammar:
            self._without_grammar.discard(request)
            return []
        return list(request.running)


def _not_finite(claim: Claim, numbers: str, dtype: str) -> ApiError:
    """Return the error of a request for which the model's numbers are not finite."""
    advice = "its weights may be damaged" if dtype == "float32" else "serve it with --dtype float32"
    message = f"The model {claim.request.model!r} failed: {numbers} are not finite, computed in {dtype}; {advice}."
    return ApiError(500, message, "server_error", code="not_finite")


def _unforeseen(claim: Claim, error: Exception) -> ApiError:
    """Return the error of a request that failed for an unforeseen reason; the worker continues.

    An error made for the client is returned as it is.
    """
    if isinstance(error, ApiError):
        return error
    logger.error("request %s failed", claim.key, exc_info=error)
    return ApiError(
        500, f"The answer cannot be made: {' '.join(str(error).split())[:500]}", "server_error", code="internal_error"
    )
