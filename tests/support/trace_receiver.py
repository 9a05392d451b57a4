"""An OTLP receiver: an HTTP server that takes spans as an OpenTelemetry collector does."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.waiting import wait_until

TRACE_SECONDS = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    failed: bool
    state: str
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    service: str


class TraceReceiver:
    """What came so far. `headers` are those of each service's last request."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.endpoint = ""

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            self.headers[service] = headers
            for scope in resource.scope_spans:
                self.spans += [_received(span, service) for span in scope.spans]

    def of(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by their names."""
        return {span.name: span for span in self.spans.copy() if span.trace_id == trace_id}

    def wait_for(self, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
        """Wait until a trace has spans of these names."""
        wait_until(lambda: set(names) <= self.of(trace_id).keys(), TRACE_SECONDS, f"the spans {names} of {trace_id}")
        return self.of(trace_id)


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    """A receiver on a port of its own."""
    receiver = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            receiver.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        span.trace_state,
        _values(span.attributes),
        {event.name: _values(event.attributes) for event in span.events},
        service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
