"""A collector of OpenTelemetry's in this process, which keeps the spans that it gets by gRPC or by HTTP."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from waiting import wait_until

MAX_SPANS = 10_000


@dataclass(frozen=True)
class Span:
    """One span; *parent* is the id of another one, "" at the top. Times are in nanoseconds."""

    name: str
    trace_id: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    has_failed: bool


class Collector:
    """What came: the newest MAX_SPANS of *num_spans*. A server is told to send them to *endpoint*."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.num_spans = 0
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        spans = [_span(span) for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
        self.spans += spans
        self.num_spans += len(spans)

    def trace(self, trace_id: str) -> tuple[Span, dict[str, Span]]:
        """Wait for the span of the request in a trace, which comes last; return it, and those of its stages by name."""
        request = wait_until(lambda: next((one for one in self._of(trace_id) if "http.route" in one.attributes), None))
        stages = {one.name: one for one in self._of(trace_id) if one is not request}
        assert {stage.parent for stage in stages.values()} <= {request.id}
        return request, stages

    def _of(self, trace_id: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextlib.contextmanager
def collecting(*, by_http: bool = False) -> Iterator[Collector]:
    """Collect while the block runs, at any free port of loopback."""
    collector = Collector()
    with (_http if by_http else _grpc)(collector):
        yield collector


@contextlib.contextmanager
def _grpc(collector: Collector) -> Iterator[None]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


@contextlib.contextmanager
def _http(collector: Collector) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def _span(span: trace_pb2.Span) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {one.key: _value(one.value) for one in span.attributes},
        [event.name for event in span.events],
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
