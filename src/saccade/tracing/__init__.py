"""Traces of requests for OpenTelemetry: trace notes stages, tracer decides which requests, otlp sends the spans."""
