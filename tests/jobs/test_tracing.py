"""Tracing by itself: contexts, names, a collector that hangs."""

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from jobs.queue.settings import QueueSettings
from jobs.tracing import FLUSH_SECONDS, Tracing, check_endpoint, start_tracing
from tests.support.trace_receiver import TraceReceiver, trace_receiver

BUSY_SECONDS = 20.0  # by which a busy machine may be late
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with trace_receiver() as receiver:
        yield receiver


def start(endpoint: str) -> Tracing:
    tracing = start_tracing(endpoint, "pipeline-test")
    assert tracing is not None
    return tracing


def test_what_is_left_is_exported_at_the_end(receiver: TraceReceiver) -> None:
    tracing = start(receiver.endpoint)
    span = tracing.start("one", "SERVER", PARENT, "a=1")
    trace, state = tracing.context_of(span)
    tracing.add_child(span, "part", 2_000, 3_000)
    span.end()
    tracing.close()
    spans = receiver.of(TRACE_ID)
    assert (trace, state) == (f"00-{TRACE_ID}-{spans['one'].span_id}-01", "a=1")
    assert spans["part"].parent_id == spans["one"].span_id
    assert (spans["part"].start, spans["part"].end) == (2_000, 3_000)
    assert spans["one"].service == "pipeline-test"


def test_the_name_of_a_service_can_be_given(receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = start(receiver.endpoint)
    tracing.start("one", "SERVER", PARENT, None).end()
    tracing.close()
    assert receiver.of(TRACE_ID)["one"].service == "mine"


def test_a_long_tracestate_goes_no_further(receiver: TraceReceiver) -> None:
    tracing = start(receiver.endpoint)
    states = ",".join(f"vendor{number}={'x' * 100}" for number in range(10))
    span = tracing.start("one", "SERVER", PARENT, states)
    trace, state = tracing.context_of(span)
    assert (trace or "").startswith(f"00-{TRACE_ID}-")
    assert state is None
    tracing.close()


def test_a_collector_that_hangs_holds_nothing_up_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        tracing = start(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        began = time.monotonic()
        for _ in range(2_000):
            tracing.start("one", "SERVER", PARENT, None).end()
        assert time.monotonic() - began < BUSY_SECONDS
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < FLUSH_SECONDS + BUSY_SECONDS
    assert [record.message for record in caplog.records if "full" in record.message] == [caplog.records[0].message]


def test_children_get_the_endpoint_by_its_standard_variable() -> None:
    url = "http://collector:4318/v1/traces"
    assert QueueSettings(otlp_traces_endpoint=url).environment()["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == url


@pytest.mark.parametrize("endpoint", [None, "http://h:1/v1/traces", "https://h"])
def test_an_endpoint_is_none_or_a_url(endpoint: str | None) -> None:
    check_endpoint(endpoint)
