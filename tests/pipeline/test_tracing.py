"""Traces of calls through a real API, Redis and worker, as a collector gets them."""

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.settings import ApiSettings
from jobs.protocol.requests import Request
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.tracing import FLUSH_SECONDS
from tests.pipeline.conftest import RunHere
from tests.support.api_server import plain_client, running_api
from tests.support.commands import run_pipeline
from tests.support.poison import Poison, poisoned_environment
from tests.support.ports import reserved_port
from tests.support.redis_server import running_server
from tests.support.trace_receiver import ReceivedSpan, TraceReceiver, trace_receiver
from tests.support.waiting import wait_until
from tests.support.worker_process import running_worker

CHAT = "/v1/chat/completions"
PHASES = ("queue", "prepare", "wait", "prefill", "decode")
SERVER, CONSUMER, INTERNAL = 2, 5, 1
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
FLAGS = ("--lease-seconds", "2", "--stream-interval", "0.2")
PATIENT_SECONDS = 30.0  # in which a process stops on a busy machine


@dataclass(frozen=True)
class TracedStack:
    queue: Queue
    receiver: TraceReceiver
    http: httpx.Client


@pytest.fixture(scope="module")
def stack() -> Iterator[TracedStack]:
    """An API and a worker that trace."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(running_server()).url
        receiver = stack.enter_context(trace_receiver())
        for name, value in SOON.items():
            patch.setenv(name, value)
        queue = Queue(connect(url), QueueSettings(lease_seconds=2.0))
        traced = ("--otlp-traces-endpoint", receiver.endpoint)
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint)  # the framework reads it too
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=lab"}
        stack.enter_context(running_worker(queue, url, *FLAGS, *traced, **headers))
        settings = ApiSettings.from_environment(redis_url=url, file_store=folder, root_path="/below")
        api_url = stack.enter_context(running_api(settings))
        yield TracedStack(queue, receiver, stack.enter_context(plain_client(api_url)))


def context(number: int, sampled: bool = True) -> tuple[str, dict[str, str]]:
    """A trace id and the header of a client that has it."""
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-00000000000000aa-{int(sampled):02d}"}


def chat(**parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "ignore_eos": True, **parameters}


@pytest.mark.proof
def test_a_streamed_call_is_one_trace_from_http_to_the_engines_steps(stack: TracedStack) -> None:
    trace_id, headers = context(1)
    body = chat(stream=True, temperature=0.5, top_p=0.9)
    answer = stack.http.post(CHAT, json=body, headers=headers | {"tracestate": "vendor=1"})
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    spans = stack.receiver.wait_for(trace_id, f"POST {CHAT}", "llm_request", *PHASES)
    server, request = spans[f"POST {CHAT}"], spans["llm_request"]
    assert sum(span.trace_id == trace_id for span in stack.receiver.spans) == len(spans) == 2 + len(PHASES)
    assert (server.parent_id, request.parent_id) == ("00000000000000aa", server.span_id)
    assert {spans[name].parent_id for name in PHASES} == {request.span_id}
    assert (server.kind, request.kind, spans["queue"].kind) == (SERVER, CONSUMER, INTERNAL)
    assert (server.service, request.service) == ("pipeline-api", "pipeline-worker")
    assert {span.state for span in spans.values()} == {"vendor=1"}
    assert not any(span.failed for span in spans.values())
    _check_times(server, request, [spans[name] for name in PHASES])
    assert server.attributes["http.request.method"] == "POST"
    assert server.attributes["http.route"] == CHAT
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["http.response.header.x-request-id"] == [answer.headers["x-request-id"]]
    _check_request(request, answer.headers["x-stream-id"])


def _check_times(server: ReceivedSpan, request: ReceivedSpan, phases: list[ReceivedSpan]) -> None:
    """One phase begins where the one before ended, and each span lies within its parent."""
    edges = [phases[0].start, *(phase.end for phase in phases)]
    assert [phase.start for phase in phases[1:]] == edges[1:-1]
    assert edges == sorted(edges)
    assert server.start <= request.start == edges[0]
    assert edges[-1] == request.end <= server.end


def _check_request(request: ReceivedSpan, live_id: str) -> None:
    found = request.attributes
    assert found["gen_ai.request.id"] == live_id
    assert found["gen_ai.request.model"] == "demo"
    assert found["gen_ai.request.max_tokens"] == found["gen_ai.usage.completion_tokens"] == 8
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert found["gen_ai.request.n"] == found["pipeline.attempt"] == 1
    assert found["gen_ai.usage.prompt_tokens"] > found["gen_ai.usage.cache_read.input_tokens"] >= 0
    waited, first, whole = (found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e"))
    assert 0 < waited < first < whole == pytest.approx((request.end - request.start) / 1e9)
    steps = [found[f"pipeline.engine.{name}"] for name in ("first_step", "first_token_step", "last_step")]
    assert steps == sorted(steps)
    assert found["pipeline.engine.token_steps"] == steps[2] - steps[1] + 1 == 8
    assert found["pipeline.preemptions"] == 0


def test_a_call_without_context_begins_a_trace(stack: TracedStack) -> None:
    answer = stack.http.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    request_id = [answer.headers["x-request-id"]]

    def found() -> list[ReceivedSpan]:
        spans = stack.receiver.spans.copy()
        return [span for span in spans if span.attributes.get("http.response.header.x-request-id") == request_id]

    wait_until(found, 60, "the span of the call")
    [server] = found()
    spans = stack.receiver.wait_for(server.trace_id, "llm_request")
    assert server.parent_id == ""
    assert spans["llm_request"].parent_id == server.span_id


@pytest.mark.parametrize(
    "traceparent",
    ["", "nonsense", "00-0-0-01", f"00-{0:032x}-00000000000000aa-01", f"ff-{7:032x}-00000000000000aa-01", "ü" * 60],
)
def test_a_malformed_context_begins_a_new_trace(traceparent: str, stack: TracedStack) -> None:
    headers = [(b"traceparent", traceparent.encode()), (b"tracestate", b"=,=\xff")]
    answer = stack.http.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    request_id = [answer.headers["x-request-id"]]

    def parents() -> list[str]:
        spans = stack.receiver.spans.copy()
        return [
            span.parent_id for span in spans if span.attributes.get("http.response.header.x-request-id") == request_id
        ]

    wait_until(parents, 60, "the span of the call")
    assert parents() == [""]


def test_a_failed_call_has_spans_that_say_so(stack: TracedStack) -> None:
    trace_id, headers = context(2)
    answer = stack.http.post(CHAT, json=chat(logit_bias={"999999": 1}), headers=headers)
    assert answer.status_code == 400
    spans = stack.receiver.wait_for(trace_id, f"POST {CHAT}", "llm_request")
    server, request = spans[f"POST {CHAT}"], spans["llm_request"]
    assert not server.failed  # the client's error is none of the server's
    assert server.attributes["http.response.status_code"] == 400
    assert request.failed
    assert request.attributes["error.type"] == answer.json()["error"]["code"]
    assert request.attributes["http.response.status_code"] == 400
    assert spans.keys() - {f"POST {CHAT}", "llm_request"} == {"queue", "prepare"}


def test_what_a_client_does_not_sample_has_no_spans(stack: TracedStack) -> None:
    unsampled, headers = context(3, sampled=False)
    assert stack.http.post(CHAT, json=chat(), headers=headers).status_code == 200
    sampled, headers = context(4)
    assert stack.http.post(CHAT, json=chat(), headers=headers).status_code == 200
    stack.receiver.wait_for(sampled, f"POST {CHAT}", "llm_request")  # which went through both after it
    assert stack.receiver.of(unsampled) == {}


def test_lines_of_a_batch_and_probes_have_no_spans_of_their_own(stack: TracedStack) -> None:
    run_line(stack.queue, "batch_t")
    assert [stack.http.get(path).status_code for path in ("/health", "/below/health")] == [200, 200]
    trace_id, headers = context(5)
    assert stack.http.post(CHAT, json=chat(), headers=headers).status_code == 200
    stack.receiver.wait_for(trace_id, f"POST {CHAT}", "llm_request")
    assert not [span for span in stack.receiver.spans if "pipeline.batch_id" in span.attributes]
    assert not [span for span in stack.receiver.spans if span.attributes.get("url.path", "").endswith("/health")]


def test_spans_hold_no_text_and_no_key(stack: TracedStack) -> None:
    trace_id, headers = context(6)
    secret = {"authorization": "Bearer sk-tralala", "cookie": "tralala=1"}
    body = chat(messages=[{"role": "user", "content": "tralala"}], user="tralala")
    assert stack.http.post(f"{CHAT}?tralala=1", json=body, headers=headers | secret).status_code == 200
    stack.receiver.wait_for(trace_id, f"POST {CHAT}", "llm_request")
    assert "tralala" not in repr(stack.receiver.of(trace_id))


def test_the_standard_variables_are_honored(stack: TracedStack) -> None:
    trace_id, headers = context(8)
    assert stack.http.post(CHAT, json=chat(), headers=headers).status_code == 200
    stack.receiver.wait_for(trace_id, "llm_request")
    assert stack.receiver.headers["pipeline-worker"]["x-tenant"] == "lab"


@pytest.mark.proof
def test_a_collector_that_hangs_changes_nothing(
    redis_url: str, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are answered, and the processes stop after at most a bounded flush."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        worker = stack.enter_context(running_worker(queue, redis_url, *FLAGS, "--otlp-traces-endpoint", endpoint))
        settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), otlp_traces_endpoint=endpoint)
        with running_api(settings) as api_url, plain_client(api_url) as http:
            for number in range(3):
                assert http.post(CHAT, json=chat(), headers=context(10 + number)[1]).status_code == 200
            began = time.monotonic()
        assert time.monotonic() - began < FLUSH_SECONDS + PATIENT_SECONDS
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < FLUSH_SECONDS + PATIENT_SECONDS


@pytest.mark.proof
def test_a_collector_that_is_away_is_logged_once(redis_url: str, queue: Queue) -> None:
    with reserved_port() as port:
        flags = (*FLAGS, "--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces")
        variables = {"OTEL_TRACES_SAMPLER": "always_on", **SOON}
        with running_worker(queue, redis_url, *flags, **variables) as worker:
            for number in range(3):
                run_line(queue, f"batch_{number}")
                wait_until(lambda: "Transient error" in worker.log(), 60, "a warning")
            assert worker.stop() == 0
            assert worker.log().count("Transient error") == 1
            assert "Traceback" not in worker.log()


@pytest.mark.proof
def test_a_call_goes_on_in_the_same_trace_after_a_kill(redis_url: str, queue: Queue, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        receiver = stack.enter_context(trace_receiver())
        flags = (*FLAGS, "--otlp-traces-endpoint", receiver.endpoint)
        slow = poisoned_environment(Poison("tortoise", "slow"))
        first = stack.enter_context(running_worker(queue, redis_url, *flags, **slow))
        settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), otlp_traces_endpoint=receiver.endpoint)
        http = stack.enter_context(plain_client(stack.enter_context(running_api(settings))))
        trace_id, headers = context(20)
        body = chat(messages=[{"role": "user", "content": "What does a tortoise eat?"}], max_tokens=400, stream=True)
        with http.stream("POST", CHAT, json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if '"content":"' in line and '"content":""' not in line)
            record = first.wait_ready()
            first.kill()
            queue.remove_worker(record.id)  # as its supervisor does
            stack.enter_context(running_worker(queue, redis_url, *flags))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        spans = receiver.wait_for(trace_id, f"POST {CHAT}", "llm_request", "decode")
        request = spans["llm_request"]
        assert request.parent_id == spans[f"POST {CHAT}"].span_id
        assert request.attributes["pipeline.attempt"] == 2
        assert request.events["resumed from checkpoint"]["tokens"] > 0
        assert request.attributes["gen_ai.usage.completion_tokens"] == 400
        assert "queue" not in spans
        assert "gen_ai.latency.time_to_first_token" not in request.attributes


@pytest.mark.parametrize("command", ["api", "worker", "serve", "run-batch"])
@pytest.mark.parametrize(
    ("endpoint", "variables", "sentence"),
    [
        ("collector:4318", {}, "'collector:4318' is not a URL such as http://collector:4318/v1/traces"),
        (
            "http://collector:4318",
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json', and there are http/protobuf and grpc only",
        ),
    ],
    ids=["url", "protocol"],
)
def test_an_endpoint_that_cannot_be_used_is_refused(
    command: str, endpoint: str, variables: dict[str, str], sentence: str, run_here: RunHere
) -> None:
    done = run_here(command, "--otlp-traces-endpoint", endpoint, **variables)
    check_refused(done.code, done.err, sentence)


@pytest.mark.parametrize(
    ("protocol", "packages"),
    [
        ("http/protobuf", "'batch-inference-pipeline[tracing]'"),
        ("grpc", "opentelemetry-exporter-otlp-proto-grpc"),
    ],
)
def test_missing_packages_are_named(protocol: str, packages: str, tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()  # it hides the installed ones
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "PYTHONPATH": str(tmp_path),
    }
    sentence = f"traces by {protocol} need packages that are missing: pip install {packages}"
    done = run_pipeline("api", **variables)
    check_refused(done.returncode, done.stderr, sentence)


def check_refused(code: int, stderr: str, sentence: str) -> None:
    assert code == 2
    line = stderr.splitlines()[-1]
    assert line.startswith("Error: Invalid value for '--otlp-traces-endpoint' ")
    assert line.endswith(f": {sentence}")


def run_line(queue: Queue, batch: str) -> None:
    """Run a batch of one line to its end."""
    queue.create_batch(batch, 1, state="in_progress")
    assert queue.ingest(batch, [(0, Request(CHAT, "demo", json.dumps(chat()).encode(), 0))], 0, 1)
    wait_until(lambda: len(queue.results(batch)) == 1, 60, "the result of the line")
