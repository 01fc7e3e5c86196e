"""The settings of traces, and what is missing for them."""

import sys

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.tracing.tracer import Tracer, TraceSettings


@table("endpoint", ["collector:4317", "ftp://collector:21", "http://collector", "http://[::1", "http://collector:x"])
def test_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(StartupError, match="--otlp-traces-endpoint is http://HOST:PORT"):
        TraceSettings(endpoint)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "saccade.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"pip install 'saccade-vlm\[tracing\]'"):
        Tracer.of_settings(TraceSettings("http://127.0.0.1:4317"))


def test_nothing_is_traced_without_an_endpoint() -> None:
    assert Tracer.of_settings(TraceSettings(sample=1)) is None
