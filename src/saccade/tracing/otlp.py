"""Sends OpenTelemetry spans to a collector through the SDK. Only a server with tracing imports this module."""

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from saccade.tracing.trace import Attributes, Trace

EXPORT_SECONDS = 3.0
"""How long one batch may take, retries included; then its spans are lost."""

logger = logging.getLogger(__name__)


class SpanSender:
    """Sends spans to *endpoint* from a thread of the SDK. If its queue of 2048 spans is full, the oldest are lost."""

    def __init__(self, endpoint: str) -> None:
        # The SDK logs every batch that fails.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first.
        resource = Resource({"service.name": "saccade"}).merge(OTELResourceDetector().detect())
        self._ids = _Ids()
        self._exporter = _Exporter(endpoint)
        self._provider = TracerProvider(ALWAYS_ON, resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("saccade")

    def send_spans(self, trace: Trace, name: str, attributes: Attributes, *, has_failed: bool) -> None:
        """Queue the span of a request that ends now, and the spans of its stages."""
        parent = Context()
        if trace.parent_id:
            sampled = TraceFlags(TraceFlags.SAMPLED)
            client = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=sampled)
            parent = set_span_in_context(NonRecordingSpan(client), parent)
        self._ids.next_trace_id, self._ids.next_span_id = trace.trace_id, trace.span_id
        request = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=trace.begun_at)
        within = set_span_in_context(request, parent)
        for stage, start, end in trace.stages:
            self._tracer.start_span(stage, within, start_time=start).end(end)
        for moment in trace.first_tokens:
            request.add_event("first token", timestamp=moment)
        if has_failed:
            request.set_status(StatusCode.ERROR)
        request.end(trace.now())

    def close(self) -> None:
        """Send the queued spans; after the first failure, drop the rest."""
        self._exporter.is_closing = True
        self._provider.shutdown()


class _Ids(RandomIdGenerator):
    """Gives a request's span the ids that the request has had since it began, and all other spans new ids."""

    next_trace_id = next_span_id = 0

    def generate_trace_id(self) -> int:
        return self.next_trace_id

    def generate_span_id(self) -> int:
        span_id, self.next_span_id = self.next_span_id, 0
        return span_id or super().generate_span_id()


class _Exporter(SpanExporter):
    """Exports to *endpoint* over gRPC, or over HTTP if it has a path. An outage is logged once, when it begins."""

    def __init__(self, endpoint: str) -> None:
        self.is_closing = False
        self._inner = _exporter(endpoint)
        self._address = urlsplit(endpoint).netloc.rpartition("@")[2]
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._fails and self.is_closing:
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            logger.warning("the collector at %s takes no spans; until it does they are lost", self._address)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    # Each of the two imports much that the other does not need.
    parts = urlsplit(endpoint)
    if parts.path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

        return by_http.OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

    return by_grpc.OTLPSpanExporter(endpoint, insecure=parts.scheme != "https", timeout=EXPORT_SECONDS)
