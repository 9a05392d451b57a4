"""Create the spans of the requests on a worker process, from recorded times.

A request has one span for each worker that claims it, `llm_request`, and below it one for each
phase. All are created when it leaves the worker. Times use the wall clock of the worker's host,
except for the start of `queue`, which uses the clock of the process that created the request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.protocol.requests import Claim, Finished
from jobs.queue.request_queue import Held
from jobs.tracing import Tracing, mark_failed
from workers.engine.messages.core import EngineRequest, StepOutput
from workers.replica.in_flight import InFlight
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.prepared import PreparedRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class _Trace:
    """The open span of a request, and the start times of its phases."""

    span: Span
    created: int
    phases: list[tuple[str, int]]
    resumed: bool
    starts: list[tuple[int, float]] = field(default_factory=list)  # as in `StepOutput`

    def began(self, name: str) -> int | None:
        return next((start for phase, start in self.phases if phase == name), None)


class RequestTraces:
    """Trace the sampled requests of one engine core."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self._open: dict[Held, _Trace] = {}

    def claimed(self, claims: Iterable[Claim]) -> None:
        """Start the spans of requests whose trace is sampled.

        A request without a context starts a trace only if a sampler is configured.
        """
        now = time.time_ns()
        for claim in claims:
            if claim.request.trace is not None or self._tracing.samples_roots:
                self._begin(claim, now)

    def prepared(self, prepared: Iterable[PreparedRequest]) -> None:
        """Record the parameters of requests in their spans."""
        for item in prepared if self._open else ():
            if trace := self._of(item.claim):
                call = item.call
                limit = {} if call.max_tokens is None else {"gen_ai.request.max_tokens": call.max_tokens}
                trace.span.set_attributes(
                    limit
                    | {
                        "gen_ai.request.temperature": call.temperature,
                        "gen_ai.request.top_p": call.top_p,
                        "gen_ai.request.n": call.n,
                    }
                )

    def prepared_pooling(self, prepared: Iterable[PreparedPooling]) -> None:
        """Record the parameters of pooling requests in their spans."""
        for item in prepared if self._open else ():
            if trace := self._of(item.claim):
                dimensions = item.pooling.dimensions
                limit = {"gen_ai.embeddings.dimension.count": dimensions} if dimensions else {}
                trace.span.set_attributes(limit | {"pipeline.pooling.inputs": len(item.inputs)})

    def copied(self, items: Sequence[PreparedRequest | PreparedPooling]) -> None:
        """Start the spans of requests prepared as copies of identical ones."""
        self.claimed(item.claim for item in items)
        self.prepared(item for item in items if isinstance(item, PreparedRequest))
        self.prepared_pooling(item for item in items if isinstance(item, PreparedPooling))

    def entered(self, claim: Claim, requests: Sequence[EngineRequest]) -> None:
        """Record that a request enters the engine."""
        if trace := self._of(claim):
            trace.phases.append(("wait", time.time_ns()))
            for request in requests:
                request.timed = True

    def late_token(self, claim: Claim, output: StepOutput, request_id: int, is_first: bool) -> None:
        """Record the first token of a choice, or its first after a preemption."""
        trace = self._of(claim)
        if trace is None:
            return
        now = time.time_ns()
        starts, known = output.starts.get(request_id, []), len(trace.starts)
        if starts and not known:
            trace.phases.append(("prefill", min(now, _wall_clock(starts[0][1]))))
            trace.span.set_attribute("pipeline.engine.first_step", starts[0][0])
        for step, when in starts if known else starts[1:]:
            trace.span.add_event("resumed after preemption", {"step": step}, min(now, _wall_clock(when)))
        trace.starts += starts
        if is_first and trace.began("decode") is None:
            trace.phases.append(("decode", now))
            trace.span.set_attribute("pipeline.engine.first_token_step", output.step)

    def left(self, request: InFlight[Any], step: int) -> None:
        """Record that a request has left the engine after step `step`."""
        trace = self._of(request.claim)
        if trace is not None and trace.starts:
            tokens = max((sequence.new_tokens for sequence in request.sequences), default=0)
            trace.span.set_attribute("pipeline.engine.last_step", step)
            trace.span.set_attribute("pipeline.engine.token_steps", tokens)
            trace.span.set_attribute("pipeline.preemptions", len(trace.starts) - 1)

    def ended(self, finished: Finished) -> None:
        """End the span of a request with its result."""
        trace = self._open.pop((finished.key, finished.fence), None)
        if trace is None:
            return
        result, usage, now = finished.result, finished.result.usage, time.time_ns()
        attributes: dict[str, int | float] = {
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.latency.e2e": (now - trace.created) / 1e9,
        }
        if result.succeeded:
            trace.span.set_attributes(attributes)
        else:
            error = msgspec.json.decode(result.body)["error"]
            trace.span.set_attribute("http.response.status_code", result.status)
            mark_failed(trace.span, error["code"] or error["type"])
        self._finish(trace, now)

    def dropped(self, claim: Claim, why: str) -> None:
        """End the span of a request that leaves without a result; `why` becomes an event."""
        trace = self._open.pop((claim.key, claim.fence), None)
        if trace is not None:
            trace.span.add_event(why)
            self._finish(trace, time.time_ns())

    def close(self) -> None:
        """End the spans of requests whose engine core has ended."""
        while self._open:
            _, trace = self._open.popitem()
            trace.span.add_event("lost")
            self._finish(trace, time.time_ns())

    def _of(self, claim: Claim) -> _Trace | None:
        return self._open.get((claim.key, claim.fence))

    def _begin(self, claim: Claim, now: int) -> None:
        request, first = claim.request, claim.attempt == 1
        created = min(now, int(request.created * 1e9)) or now
        started = created if first else now
        span = self._tracing.start("llm_request", "CONSUMER", request.trace, request.trace_state, started)
        if not span.is_recording():
            return
        span.set_attributes(_attributes(claim, self._worker))
        if claim.checkpoint is not None:
            tokens = sum(len(choice.token_ids) for choice in claim.checkpoint.choices.values())
            span.add_event("resumed from checkpoint", {"tokens": tokens}, now)
        queue = [("queue", created)] if first else []
        self._open[claim.key, claim.fence] = _Trace(
            span, created, [*queue, ("prepare", now)], claim.checkpoint is not None
        )

    def _finish(self, trace: _Trace, now: int) -> None:
        span, first_step, first_token = trace.span, trace.began("prefill"), trace.began("decode")
        if first_step is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", (first_step - trace.created) / 1e9)
        if first_token is not None and not trace.resumed:
            span.set_attribute("gen_ai.latency.time_to_first_token", (first_token - trace.created) / 1e9)
        for (name, start), (_, end) in pairwise([*trace.phases, ("", now)]):
            self._tracing.add_child(span, name, start, end)
        span.end(now)


def _attributes(claim: Claim, worker: str) -> dict[str, str | int]:
    """Return the span attributes that identify a request and its worker."""
    key, live = claim.key, claim.live
    named: dict[str, str | int] = {} if live else {"pipeline.batch_id": key.batch, "pipeline.line": key.line}
    return named | {
        "gen_ai.request.id": key.batch if live else str(key),
        "gen_ai.request.model": claim.request.model,
        "pipeline.endpoint": claim.request.endpoint,
        "pipeline.attempt": claim.attempt,
        "pipeline.worker": worker,
    }


def _wall_clock(monotonic: float) -> int:
    """Convert a time of this machine's monotonic clock to the wall clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
