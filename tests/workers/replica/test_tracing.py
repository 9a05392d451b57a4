"""The spans of a worker's requests, made by the SDK and kept in memory; the engine is scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import ChoiceCheckpoint, Claim, Delta, Finished, Request, RequestCheckpoint, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue.streams import ControlMessage
from jobs.tracing import Tracing
from tests.support.scripted_engine import ScriptedEngine
from workers.replica.duplicates import prepare_once
from workers.replica.grammars import Grammars
from workers.replica.preparation import Preparation
from workers.replica.requests_in_flight import rejected
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.replica.tracing import RequestTraces
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
_fences = count(1)


class NoGrammars:
    async def compile(self, wanted: OutputFormat) -> str:
        raise NotImplementedError


class TracedBench:
    """Preparation and engine of a worker that traces, without a queue."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.traces = RequestTraces(Tracing(provider), "w1")
        self.engine = ScriptedEngine(lambda prompt, sampling: [65] * 100)
        self.running = Running(self.engine, self, Grammars(NoGrammars()), partial(next, count(100)), 2.0, self.traces)
        limits = ModelLimits(256, 1024, ())
        self.preparation = Preparation(TOKENIZER, ["demo"], limits, traces=self.traces)
        self.results: list[Finished] = []
        self._steps = count(5)

    def accept(self, delta: Delta) -> None:
        pass

    def finish(self, finished: Finished) -> None:
        self.results.append(finished)

    def live_tokens_wait(self) -> None:
        pass

    def tokens_wait(self, first: bool) -> None:
        pass

    def start(self, *claims: Claim) -> None:
        prepared, errors = self.preparation.prepare(claims)
        self.running.start(prepared)
        self.running.reject(errors)

    def step(self, starts: bool = False, tokens: int = 1) -> None:
        output = self.engine.step(lambda request: tokens)
        output.step = next(self._steps)
        if starts:
            output.starts = {each: [(output.step, time.monotonic())] for each in output.request_ids}
        self.running.on_step(output)

    def named(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans.get_finished_spans()}


@pytest.fixture
def bench() -> Iterator[TracedBench]:
    async def make() -> TracedBench:
        return TracedBench()

    with asyncio.Runner() as runner:
        yield runner.run(make())


def claim(trace: str | None = PARENT, attempt: int = 1, live: bool = True, **more: object) -> Claim:
    key = RequestKey("live_1", 0) if live else RequestKey("batch_a", 17)
    body = b'{"model": "demo", "prompt": "a", "max_tokens": 3, "ignore_eos": true}'
    request = Request("/v1/completions", "demo", body, 1, created=time.time() - 1, trace=trace)
    return Claim(key, next(_fences), request, None, attempt, live, **more)  # type: ignore[arg-type]


def attributes(span: ReadableSpan) -> dict[str, object]:
    assert span.attributes is not None
    return dict(span.attributes)


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def test_steps_and_preemptions_of_a_request(bench: TracedBench) -> None:
    bench.start(claim())
    assert all(request.timed for request in bench.engine.added)
    bench.step(starts=True)
    bench.step(tokens=0)
    bench.step(starts=True)
    bench.step()
    request = bench.named()["llm_request"]
    found = attributes(request)
    steps = [found[f"pipeline.engine.{name}"] for name in ("first_step", "first_token_step", "last_step")]
    assert steps == [5, 5, 8]
    assert (found["pipeline.engine.token_steps"], found["pipeline.worker"]) == (3, "w1")
    assert found["pipeline.preemptions"] == 1
    assert events(request) == ["resumed after preemption"]
    assert request.context is not None
    assert f"{request.context.trace_id:032x}" == TRACE_ID


@pytest.mark.parametrize("why", ["requeued", "cancelled or lost", "lost"])
def test_a_request_that_leaves_without_a_result_says_why(why: str, bench: TracedBench) -> None:
    one = claim()
    bench.start(one)
    bench.step(starts=True)
    if why == "requeued":
        bench.running.drop([one.key])
    elif why == "lost":
        bench.traces.close()
    else:
        bench.running.cancel(ControlMessage("1-0", "cancel", keys=[one.key]))
    named = bench.named()
    assert events(named["llm_request"]) == [why]
    assert {"queue", "prepare", "wait", "prefill", "decode"} < named.keys()
    assert "gen_ai.latency.e2e" not in attributes(named["llm_request"])


def test_a_copy_has_a_span_though_it_is_not_prepared(bench: TracedBench) -> None:
    claims = [claim(live=False), claim(live=False)]
    for line, one in enumerate(claims):
        one.key = RequestKey("batch_a", line)
        one.request.body = one.request.body.replace(b"{", b'{"temperature": 0, ', 1)
    prepared, errors = prepare_once(bench.preparation.prepare, bench.running.prepared, bench.traces, claims)

    async def start_and_end() -> None:
        bench.running.start(prepared)
        assert (errors, len(bench.engine.added)) == ([], 1)
        bench.running.cancel(ControlMessage("1-0", "cancel", batch="batch_a"))

    asyncio.run(start_and_end())
    found = [attributes(span) for span in bench.spans.get_finished_spans() if span.name == "llm_request"]
    assert {span["pipeline.line"] for span in found} == {0, 1}
    assert [span["gen_ai.request.max_tokens"] for span in found] == [3, 3]


def test_the_next_worker_goes_on_in_the_trace_without_the_wait_in_the_queue(bench: TracedBench) -> None:
    checkpoint = RequestCheckpoint({0: ChoiceCheckpoint([65, 65], 2)})
    two = claim(attempt=2)
    two.checkpoint = checkpoint
    bench.start(two)
    bench.step(starts=True)
    named = bench.named()
    assert events(named["llm_request"]) == ["resumed from checkpoint"]
    found = attributes(named["llm_request"])
    assert (found["pipeline.attempt"], found["gen_ai.usage.completion_tokens"]) == (2, 3)
    assert "gen_ai.latency.time_to_first_token" not in found
    assert "queue" not in named


def test_what_cannot_be_prepared_fails_in_its_span(bench: TracedBench) -> None:
    bad = claim()
    bad.request.body = b'{"model": "demo", "prompt": "a", "max_tokens": -1}'
    bench.start(bad)
    request = bench.named()["llm_request"]
    assert not request.status.is_ok
    assert attributes(request)["http.response.status_code"] == 400


@pytest.mark.parametrize("sampler", [None, "always_on", "always_off"])
def test_lines_of_a_batch_are_traced_where_a_sampler_says_so(
    sampler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)

    async def spans() -> dict[str, ReadableSpan]:
        bench = TracedBench()
        bench.start(claim(None, live=False))
        for _ in range(3):
            bench.step()
        assert len(bench.results) == 1
        return bench.named()

    found = asyncio.run(spans())
    assert bool(found) == (sampler == "always_on")
    if found:
        line = attributes(found["llm_request"])
        assert (line["pipeline.batch_id"], line["pipeline.line"]) == ("batch_a", 17)
        assert line["gen_ai.request.id"] == "batch_a/17"


def test_an_unsampled_context_is_left_alone(bench: TracedBench) -> None:
    bench.start(claim(PARENT[:-1] + "0"))
    assert not any(request.timed for request in bench.engine.added)
    bench.running.reject([rejected(claim(), ApiError(500, "x"))])
    assert bench.named() == {}


def test_a_clock_behind_that_of_the_api_gives_no_negative_wait(bench: TracedBench) -> None:
    ahead = claim()
    ahead.request.created = time.time() + 60
    bench.start(ahead)
    for _ in range(3):
        bench.step(starts=True)
    for span in bench.spans.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
