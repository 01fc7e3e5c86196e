"""Request tracing: its settings, and the Tracer that begins and ends the traces."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.validators import Number

from saccade.config import FLAT
from saccade.errors import StartupError
from saccade.tracing.trace import TRACE, Attributes, Trace

if TYPE_CHECKING:
    from saccade.tracing.otlp import SpanSender


@FLAT
@dataclass(frozen=True)
class TraceSettings:
    """Where requests' traces go; without *endpoint* there are no traces."""

    endpoint: Annotated[str | None, Parameter(name="--otlp-traces-endpoint")] = None
    "An OpenTelemetry collector for traces of requests: http://HOST:4317, or with HTTP http://HOST:4318/v1/traces."
    sample: Annotated[float, Parameter(name="--trace-sample", validator=Number(gte=0, lte=1))] = 1.0
    "The part of the requests that have a trace; if a client sends a `traceparent`, its flag decides."

    def __post_init__(self) -> None:
        """Raise StartupError for an endpoint that is not an http, https or grpc URL with a host and a port."""
        if self.endpoint is None:
            return
        try:
            parts = urlsplit(self.endpoint)
            is_address = parts.scheme in ("http", "https", "grpc") and bool(parts.hostname and parts.port)
        except ValueError:
            is_address = False
        if not is_address:
            raise StartupError(
                f"--otlp-traces-endpoint is http://HOST:PORT or https://HOST:PORT, not {self.endpoint!r}."
            )


NO_TRACES = TraceSettings()


class Tracer:
    """Begins the traces of requests, and sends their spans to *sender*.

    trace = tracer.begin_trace(headers)
    ...
    tracer.end_trace(trace, "POST /v1/chat/completions", {"http.response.status_code": 200}, has_failed=False)
    """

    def __init__(self, sender: "SpanSender", sample: float) -> None:
        self._sender = sender
        self._sample = sample

    @classmethod
    def of_settings(cls, settings: TraceSettings) -> Self | None:
        """Return a tracer, or None without an endpoint. Raises StartupError if OpenTelemetry is not installed."""
        return None if settings.endpoint is None else cls(_sender(settings.endpoint), settings.sample)

    def begin_trace(self, headers: Iterable[tuple[bytes, bytes]]) -> Trace:
        """Begin and return the trace of the request with *headers*, which this task serves."""
        trace = Trace.of_headers(headers, self._sample)
        TRACE.set(trace)
        return trace

    def end_trace(self, trace: Trace, name: str, attributes: Attributes, *, has_failed: bool) -> None:
        """Queue an ended request's span, which has *name* and *attributes*, and its stages' spans, without waiting."""
        if trace.is_sampled:
            self._sender.send_spans(trace, name, attributes, has_failed=has_failed)
            trace.is_sampled = False  # what ends later, such as a fetch that others share, is too late

    def close(self) -> None:
        """Send the queued spans, waiting a few seconds at most."""
        self._sender.close()


def _sender(endpoint: str) -> "SpanSender":
    try:
        from saccade.tracing.otlp import SpanSender
    except ImportError as error:
        raise StartupError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: pip install 'saccade-vlm[tracing]'."
        ) from error
    return SpanSender(endpoint)
