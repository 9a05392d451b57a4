"""OpenTelemetry traces: starting the export of spans, and passing on a span's context.

Nothing of OpenTelemetry is imported before `start_tracing` is called with an endpoint. The SDK
reads its standard variables itself: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jobs.extras import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""How long an ending process waits for the export of its last spans."""

_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_INSTALL = {
    "http/protobuf": install_command("tracing"),
    "grpc": "pip install opentelemetry-exporter-otlp-proto-grpc",
}
_LONGEST_STATE = 512  # characters of a tracestate; W3C requires to pass on this many


def start_tracing(endpoint: str | None, process: str) -> Tracing | None:
    """Return the tracing of this process; None without an endpoint.

    `process` is its name unless OTEL_SERVICE_NAME is set: pipeline-api, pipeline-worker.
    """
    if endpoint is None:
        return None
    library = logging.getLogger("opentelemetry")
    library.handlers[:], library.propagate = [_FirstOfEach()], False
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = importlib.import_module(_EXPORTERS[_protocol()]).OTLPSpanExporter(endpoint=endpoint)
    provider = TracerProvider(resource=_resource(process), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def check_endpoint(endpoint: str | None) -> None:
    """Raise ValueError for an endpoint that is not a URL, or without the packages for its
    protocol.
    """
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{endpoint!r} is not a URL such as http://collector:4318/v1/traces")
    protocol = _protocol()
    if protocol not in _EXPORTERS:
        choices = " and ".join(_EXPORTERS)
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}, and there are {choices} only")
    if not all(_is_installed(module) for module in ("opentelemetry.sdk.trace", _EXPORTERS[protocol])):
        raise ValueError(f"traces by {protocol} need packages that are missing: {_INSTALL[protocol]}")


class Tracing:
    """Creates the spans of one process, which a thread of the SDK exports in the background.

    `samples_roots`: whether requests without a context may begin a trace. Times are nanoseconds of
    the wall clock since 1970.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Traces of batches only on request, since they are many.
        self.samples_roots = bool(os.environ.get("OTEL_TRACES_SAMPLER"))
        self._provider = provider
        self._tracer = provider.get_tracer("pipeline")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = SpanKind
        self._in_context = set_span_in_context
        self._no_context = Context()

    def start(self, name: str, kind: str, trace: str | None, state: str | None, start_time: int | None = None) -> Span:
        """Return a span that continues a `traceparent` and its `tracestate`.

        It begins a trace if there is none, or a malformed one. `kind` is SERVER or CONSUMER.
        """
        headers = {"traceparent": trace or "", "tracestate": state or ""}
        context = self._propagator.extract(headers, context=self._no_context)
        return self._tracer.start_span(name, context, self._kinds[kind], start_time=start_time)

    def add_child(self, parent: Span, name: str, start: int, end: int) -> None:
        """Add a span that has ended."""
        context = self._in_context(parent, self._no_context)
        self._tracer.start_span(name, context, start_time=start).end(max(start, end))

    def context_of(self, span: Span) -> tuple[str | None, str | None]:
        """Return `traceparent` and `tracestate` of a span, for spans that continue it."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._in_context(span, self._no_context))
        state = headers.get("tracestate")
        return headers.get("traceparent"), state if state and len(state) <= _LONGEST_STATE else None

    def close(self) -> None:
        """Export the remaining spans, for at most FLUSH_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)


def mark_failed(span: Span, reason: str) -> None:
    """Set the status of a span to an error."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR))


class _FirstOfEach(logging.Handler):
    """Log the first of each kind of the library's messages: an unreachable collector would fill the
    log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._known: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg not in self._known:
            self._known.add(record.msg)
            logger.warning("traces: %s (logged once)", record.getMessage())


def _resource(process: str) -> Any:
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"host.name": socket.gethostname(), "process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        return resource.merge(Resource({"service.name": process}))
    return resource


def _protocol() -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((value for name in names if (value := os.environ.get(name))), "http/protobuf")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
