"""Requests to a real gateway become spans at a collector; without one they are served all the same."""

import socket
from pathlib import Path

import pytest
import scripted
from chats import data_url, random_image
from collector import collecting

from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import Failure, FinishReason, SampleTimes, TokenDelta
from saccade.tracing.tracer import TraceSettings

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = CLIENT.split("-")[1]
PIXELS = {"queue", "decode", "preprocess", "write"}


def traced(endpoint: str, sample: float = 1.0) -> GatewayConfig:
    return GatewayConfig(tracing=TraceSettings(endpoint, sample))


@pytest.mark.parametrize("by_http", [False, True])
def test_a_chat_with_an_image_becomes_one_trace(
    tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, by_http: bool
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with (
        collecting(by_http=by_http) as collector,
        scripted.running(tiny_qwen3_vl, traced(collector.endpoint)) as gateway,
    ):
        gateway.worker.script = [
            TokenDelta("r", [300]),
            TokenDelta("r", [301], FinishReason.LENGTH, times=SampleTimes(1e-5, 2e-5, 3e-5, 1e-5)),
        ]
        image = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, seed=1))}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
        answer = gateway.ask("POST", "/v1/chat/completions", body, traceparent=CLIENT)
        assert answer.status == 200
        request, stages = collector.trace(TRACE_ID)
        assert request.name == "POST /v1/chat/completions"
        assert request.parent == CLIENT.split("-")[2]
        assert request.events == ["first token"]
        assert not request.has_failed
        assert request.attributes == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "saccade.request_id": answer.headers["x-request-id"],
            "saccade.worker": "grpc://scripted:1",
            "saccade.images": 1,
            "gen_ai.response.id": answer.json["id"],
            "gen_ai.request.model": "tiny",
            "gen_ai.usage.input_tokens": answer.json["usage"]["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.response.finish_reasons": ["length"],
        }
        engine = {"engine.queue", "engine.encode", "engine.prefill", "engine.decode"}
        assert stages.keys() == {"hash", "tokenize", "route", "media", "prepare"} | PIXELS | engine
        assert all(request.start <= stage.start <= stage.end <= request.end for stage in stages.values())
        for stage in PIXELS:
            assert stages["media"].start <= stages[stage].start <= stages[stage].end <= stages["media"].end
        (sent,) = gateway.worker.requests
        assert sent.traceparent == f"00-{TRACE_ID}-{request.id}-01"


def test_what_is_traced(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as collector, scripted.running(tiny_qwen3_vl, traced(collector.endpoint, 0)) as gateway:
        gateway.answer_two_tokens()
        gateway.chat()
        assert str(gateway.worker.requests[-1].traceparent).endswith("-00")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        failure = Failure("worker_failed", "The worker has gone.")
        gateway.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [], FinishReason.ERROR, failure=failure)]
        gateway.ask("POST", "/v1/chat/completions", body, traceparent=CLIENT)
        broken, _ = collector.trace(TRACE_ID)
        assert broken.has_failed
        assert broken.attributes["error.type"] == "worker_failed"
        gateway.ask("GET", "/health", traceparent=CLIENT)
        refused = CLIENT.replace("0af7", "0af8")
        gateway.ask("POST", "/v1/chat/completions", {}, traceparent=refused)
        request, stages = collector.trace(refused.split("-")[1])
        assert request.attributes["http.response.status_code"] == 400
        assert not request.has_failed
        assert not stages
        assert {span.trace_id for span in collector.spans} == {TRACE_ID, refused.split("-")[1]}


def test_an_unreachable_collector_costs_one_warning(
    tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr("saccade.tracing.otlp.EXPORT_SECONDS", 0.1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with scripted.running(tiny_qwen3_vl, traced(endpoint)) as gateway:
            gateway.answer_two_tokens()
            for _ in range(20):
                assert gateway.chat().status == 200
    messages = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert messages == [
        f"the collector at {endpoint.removeprefix('http://')} takes no spans; until it does they are lost"
    ]


def test_nothing_is_traced_without_an_endpoint(gateway: scripted.Gateway) -> None:
    assert (
        gateway.ask(
            "POST",
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
            traceparent=CLIENT,
        ).status
        == 200
    )
    assert not gateway.worker.requests[-1].traceparent
