"""Traces of requests for OpenTelemetry: `trace` notes stages, `tracer` begins and ends traces, `otlp` sends spans."""
