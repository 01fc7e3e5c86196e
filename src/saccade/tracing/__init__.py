"""Traces of requests for OpenTelemetry: `trace` notes stages, `tracer` chooses requests, `otlp` sends spans."""
