"""The server around the endpoints: keys, ids, origins, limits, readiness, drain, metrics."""

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import openai
import pytest
import scripted
from chats import data_url, random_image
from server import free_port
from tables import table
from waiting import wait_until

from saccade.errors import StartupError
from saccade.gateway import app
from saccade.gateway.config import GatewayConfig
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.protocol.engine_load import Load
from saccade.protocol.output import Failure, FinishReason, SampleTimes, TokenDelta, TokenLogprob

PATHS = ("/v1/models", "/v1/models/tiny", "/load", "/metrics", "/version", "/openapi.json", "/nothing")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def guarded(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway with two keys, one origin and a small body limit."""
    config = GatewayConfig(api_keys=("one", "two"), allowed_origins=("https://chat.example",), max_body_bytes=4000)
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        yield gateway


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@table("path", PATHS)
@table("headers", [{}, bearer("on"), bearer("one "), bearer(""), {"Authorization": "Basic one"}])
def test_everything_needs_a_key(path: str, headers: dict[str, str], guarded: scripted.Gateway) -> None:
    answer = guarded.ask("GET", path, **headers)
    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["one", "two"])
def test_any_of_the_keys_opens(key: str, guarded: scripted.Gateway) -> None:
    assert guarded.ask("GET", "/v1/models", **bearer(key)).status == 200
    assert guarded.ask("POST", "/v1/chat/completions", CHAT, **bearer(key)).status == 200
    assert guarded.ask("POST", "/v1/chat/completions", CHAT).status == 401


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping"])
def test_probes_need_no_key(path: str, guarded: scripted.Gateway) -> None:
    assert guarded.ask("GET", path).status == 200


@table("path", ["/live/../v1/models", "//live", "/LIVE", "/live//", "/v1/models?/live", "/v1/models#/live"])
def test_paths_near_a_probe_need_a_key(path: str, guarded: scripted.Gateway) -> None:
    assert guarded.ask("GET", path).status == 401
    assert guarded.ask("GET", "/v1/models", Host="x/live?").status == 401


def test_tenants_have_salts_of_their_own(guarded: scripted.Gateway, gateway: scripted.Gateway) -> None:
    guarded.worker.requests.clear()
    for key in ("one", "two", "one"):
        guarded.ask("POST", "/v1/chat/completions", CHAT, **bearer(key))
    first, second, again = (request.salt for request in guarded.worker.requests)
    assert first == again != second
    assert len(first) == len(second) == 16
    gateway.chat()
    assert gateway.worker.requests[0].salt == b""
    assert "plain-key" not in repr(vars(ApiKeyStore(("plain-key",))))


def test_body_over_the_limit(guarded: scripted.Gateway) -> None:
    answer = guarded.ask("POST", "/v1/chat/completions", b" " * 4001, **bearer("one"))
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")


def test_body_over_the_limit_without_a_length(guarded: scripted.Gateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=10)
    headers = {"Content-Type": "application/json", **bearer("one")}
    connection.request("POST", "/tokenize", iter([b" " * 3000] * 2), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(("origin", "allowed"), [("https://chat.example", True), ("https://other.example", False)])
def test_origins(origin: str, allowed: bool, guarded: scripted.Gateway) -> None:
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = guarded.ask("OPTIONS", "/v1/chat/completions", **preflight)
    assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
    refused = guarded.ask("GET", "/v1/models", Origin=origin)
    assert refused.status == 401
    assert (refused.headers.get("access-control-allow-origin") == origin) == allowed
    assert refused.headers["x-request-id"]


@table(("given", "kept"), [("my-id.1", True), ("a" * 129, False), ("with space", False), (None, False)])
@table("path", ["/live", "/nothing", "/v1/models"])
def test_request_ids(given: str | None, kept: bool, path: str, guarded: scripted.Gateway) -> None:
    answer = guarded.ask("GET", path, **({"X-Request-Id": given} if given else {}))
    assert (answer.headers["x-request-id"] == given) == kept
    assert len(answer.headers["x-request-id"]) >= 7


@table(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models//", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/tokenize", 400, "invalid_value"),
        ("POST", "/detokenize", 400, "invalid_value"),
    ],
)
def test_errors_are_openai_errors(method: str, path: str, status: int, code: str, gateway: scripted.Gateway) -> None:
    answer = gateway.ask(method, path, b"{" if method == "POST" else None)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert "''" not in answer.json["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert ("allow" in answer.headers) == (status == 405)


def test_models(gateway: scripted.Gateway) -> None:
    models = gateway.ask("GET", "/v1/models").json
    assert models["object"] == "list"
    assert models["data"] == [gateway.ask("GET", "/v1/models/tiny").json]
    assert models["data"][0]["max_model_len"] == scripted.MAX_MODEL_LEN
    assert "note" not in models["data"][0]


@pytest.mark.parametrize("text", ["Hello", "<|im_end|> 你好", ""])
def test_tokenize_and_back(text: str, gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", "/tokenize", {"prompt": text}).json
    assert answer["count"] == len(answer["tokens"])
    assert gateway.eos not in answer["tokens"]
    assert gateway.ask("POST", "/detokenize", {"model": "tiny", "tokens": answer["tokens"]}).json == {"prompt": text}


def test_tokenize_shows_what_the_model_will_see(gateway: scripted.Gateway) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(random_image(70, 50, 1))}},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    tokens = gateway.ask("POST", "/tokenize", {"model": "tiny", "messages": messages}).json["tokens"]
    assert gateway.chat(content).status == 200
    assert tokens == gateway.worker.requests[0].token_ids
    bare = gateway.ask("POST", "/tokenize", {"messages": messages, "add_generation_prompt": False}).json["tokens"]
    assert tokens[: len(bare)] == bare != tokens


def test_tokenize_takes_what_a_chat_takes(gateway: scripted.Gateway) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(random_image(640, 640, 1))}}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "no", "reasoning_content": "Hm"}]
    fields = {"chat_template_kwargs": {"add_vision_id": True}, "mm_processor_kwargs": {"max_pixels": 320 * 320}}
    plain, tokens = (
        gateway.ask("POST", "/tokenize", {"model": "tiny", "messages": messages, **given}).json["tokens"]
        for given in ({}, fields)
    )
    assert len(plain) - 20 * 20 < len(tokens) - 10 * 10
    assert gateway.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": messages, **fields}).status == 200
    assert tokens == gateway.worker.requests[0].token_ids


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}, {"prompt": 3}, {"tokens": [-1]}])
def test_tokenize_refuses(body: dict[str, Any], gateway: scripted.Gateway) -> None:
    assert gateway.ask("POST", "/tokenize", body).status == 400
    assert gateway.ask("POST", "/detokenize", body).status == 400


def test_metrics(gateway: scripted.Gateway) -> None:
    gateway.worker.become(
        load=Load(
            num_running=2,
            num_blocks=10,
            num_free_blocks=4,
            prompt_tokens_total=7,
            encode_seconds_total=0.5,
            evicted_state_tokens_total=8,
            num_waiting_tokens=300,
            step_tokens_total=40_010,
            steps_by_tokens=(3, 2, *[0] * 11, 1),
        )
    )
    gateway.chat()
    answer = gateway.ask("GET", "/metrics")
    gateway.worker.become(load=None)
    lines = answer.body.decode().splitlines()
    labels = '{model_name="tiny",worker="grpc://scripted:1"}'
    for line in (
        f"vllm:num_requests_running{labels} 2.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"saccade_prompt_tokens_waiting{labels} 300.0",
        f"vllm:kv_cache_usage_perc{labels} 0.6",
        f"vllm:prompt_tokens_total{labels} 7.0",
        f"vllm:prefix_cache_hits_total{labels} 0.0",
        'saccade_step_seconds_total{model_name="tiny",stage="encode",worker="grpc://scripted:1"} 0.5',
        f'saccade_prefix_cache_stateless_tokens_total{{cause="evicted_state",{labels[1:]} 8.0',
        'vllm:iteration_tokens_total_bucket{le="1.0",model_name="tiny",worker="grpc://scripted:1"} 3.0',
        'vllm:iteration_tokens_total_bucket{le="16384.0",model_name="tiny",worker="grpc://scripted:1"} 5.0',
        'vllm:iteration_tokens_total_bucket{le="+Inf",model_name="tiny",worker="grpc://scripted:1"} 6.0',
        f"vllm:iteration_tokens_total_count{labels} 6.0",
        f"vllm:iteration_tokens_total_sum{labels} 40010.0",
        'vllm:cache_config_info{block_size="16",cache_dtype="float32",enable_prefix_caching="None",'
        'gpu_memory_utilization="None",model_name="tiny",num_gpu_blocks="64",worker="grpc://scripted:1"} 1.0',
        "saccade_log_lines_dropped_total 0.0",
        "saccade_slots_in_use 0.0",
        f"saccade_image_cache_misses_total {float(gateway.metric('saccade_image_cache_misses_total'))}",
    ):
        assert line in lines
    names = {line.split("{")[0].split(" ")[0] for line in lines}
    assert {
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total",
        "vllm:request_params_n_bucket", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
        "saccade_event_loop_lag_seconds_count", "saccade_http_requests_total", "saccade_stage_seconds_bucket",
    } <= names  # fmt: skip
    assert answer.headers["content-type"].startswith("text/plain")


def test_workers_say_how_many_bytes_a_step_reads(gateway: scripted.Gateway) -> None:
    described = gateway.worker.state.description
    assert described is not None
    assert b"saccade_step_weight_bytes{" not in gateway.ask("GET", "/metrics").body
    gateway.worker.become(description=msgspec.structs.replace(described, step_bytes=123))
    answer = gateway.ask("GET", "/metrics")
    gateway.worker.become(description=described)
    assert b'saccade_step_weight_bytes{model_name="tiny",worker="grpc://scripted:1"} 123.0' in answer.body


def test_a_load_that_cannot_be_shown_costs_the_rows_of_engines_only(gateway: scripted.Gateway) -> None:
    failures = {"name": "saccade_metric_collector_failures_total", "collector": "FleetCollector"}
    before = gateway.metric(**failures)
    gateway.worker.become(load=Load(steps_by_tokens=(1, 2)))  # its client would not have let it in
    answer = gateway.ask("GET", "/metrics")
    gateway.worker.become(load=None)
    assert answer.status == 200
    assert b"saccade_requests_in_flight" in answer.body
    assert b"vllm:num_requests_running" not in answer.body
    assert gateway.metric(**failures) == before + 1
    assert b"vllm:num_requests_running" in gateway.ask("GET", "/metrics").body


def test_impossible_metric_values_are_not_added(gateway: scripted.Gateway) -> None:
    labels = {"model_name": "tiny"}
    names = [
        f"vllm:request_{stage}_time_seconds_{part}"
        for stage in ("queue", "prefill", "decode")
        for part in ("sum", "count")
    ]
    before = [gateway.metric(name, **labels) for name in names]
    times = SampleTimes(math.nan, math.inf, -1.0, math.nan)
    for num_cached_tokens in (-5, 1 << 40):
        gateway.worker.script = [
            TokenDelta("r", [300], num_cached_tokens=num_cached_tokens),
            TokenDelta("r", [301], FinishReason.LENGTH, num_cached_tokens=num_cached_tokens, times=times),
        ]
        usage = gateway.chat().json["usage"]
        expected = 0 if num_cached_tokens < 0 else usage["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    assert [gateway.metric(name, **labels) for name in names] == before


def test_hostile_worker_ends_its_own_request_at_most(gateway: scripted.Gateway) -> None:
    ids = [300, 10**9, -7, 2**63]
    odd = [TokenLogprob(-1.0, -5, ids, [-1.0] * len(ids))] * len(ids)
    failure = Failure("no_such_code", "a\x1b[31mb\r\nc", "p\x07")
    table: dict[str, tuple[list[TokenDelta], int]] = {
        "ids that no vocabulary has": ([TokenDelta("r", ids, FinishReason.LENGTH, logprobs=odd)], 200),
        "the end twice": ([TokenDelta("r", [300], FinishReason.LENGTH)] * 2, 200),
        "a sample that was not asked for": ([TokenDelta("r", [300], FinishReason.LENGTH, index=7)], 500),
        "a code that no error has": ([TokenDelta("r", [], failure=failure)], 500),
    }
    for name, (deltas, status) in table.items():
        gateway.worker.script = list(deltas)
        answer = gateway.chat(logprobs=True, top_logprobs=4, return_token_ids=True)
        assert answer.status == status, (name, answer.body)
        if deltas[0].failure is not None:
            error = answer.json["error"]
            assert (error["message"], error["param"]) == ("a [31mb  c", "p "), name


def test_request_parameters_are_measured(gateway: scripted.Gateway) -> None:
    names = ("vllm:request_params_n", "vllm:request_params_max_tokens")
    before = {
        name: [gateway.metric(f"{name}_{part}", model_name="tiny") for part in ("count", "sum")] for name in names
    }
    gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH, index=index) for index in range(2)]
    assert gateway.chat(n=2, max_tokens=7).status == 200
    gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
    assert gateway.chat().status == 200  # no limit of its own
    after = {name: [gateway.metric(f"{name}_{part}", model_name="tiny") for part in ("count", "sum")] for name in names}
    grown = {name: [new - old for new, old in zip(after[name], before[name], strict=True)] for name in names}
    assert grown == {"vllm:request_params_n": [2, 3], "vllm:request_params_max_tokens": [1, 7]}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_sagemaker_pings(method: str, gateway: scripted.Gateway) -> None:
    assert gateway.ask(method, "/ping").status == 200


def test_load_counts_requests_in_flight(gateway: scripted.Gateway) -> None:
    assert gateway.ask("GET", "/load").json == {"server_load": 0}
    gateway.worker.script = [
        TokenDelta("r", [300]),
        go_on := Event(),
        TokenDelta("r", [gateway.eos], FinishReason.STOP),
    ]
    running = threading.Thread(target=gateway.chat)
    running.start()
    wait_until(lambda: gateway.ask("GET", "/load").json == {"server_load": 1})
    go_on.set()
    running.join()


def test_labels_hold_nothing_a_client_sent(gateway: scripted.Gateway) -> None:
    gateway.ask("GET", "/some-secret-path")
    gateway.ask("GET", "/v1/models/some-secret-model")
    gateway.chat("some-secret-text", model="some-secret-model")
    assert b"secret" not in gateway.ask("GET", "/metrics").body


def test_without_a_worker(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, described=False) as gateway:
        assert gateway.ask("GET", "/live").status == 200
        assert gateway.ask("GET", "/v1/models").json == {"object": "list", "data": []}
        for answer in (
            gateway.ask("GET", "/ready"),
            gateway.ask("GET", "/health"),
            gateway.chat(),
            gateway.ask("POST", "/tokenize", {"prompt": "a"}),
        ):
            assert (answer.status, answer.json["error"]["code"]) == (503, "worker_unavailable")
            assert answer.headers["retry-after"] == "1"


def test_drain_finishes_running_requests_and_refuses_new_ones(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl) as gateway:
        gateway.worker.script = [TokenDelta("r", [300]), go_on := Event(), TokenDelta("r", [301], FinishReason.LENGTH)]
        answers: list[scripted.Answer] = []
        running = threading.Thread(target=lambda: answers.append(gateway.chat()))
        running.start()
        wait_until(lambda: len(gateway.worker.requests) == 1)
        gateway.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: gateway.application.limits.admission.draining)
        for answer in (gateway.ask("GET", "/ready"), gateway.chat()):
            assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
        assert gateway.ask("GET", "/live").status == 200
        go_on.set()
        running.join(20)
        assert answers[0].status == 200
        assert answers[0].json["choices"][0]["finish_reason"] == "length"


def test_drain_ends_when_its_time_is_over(tiny_qwen3_vl: Path) -> None:  # contract 8
    with scripted.running(tiny_qwen3_vl, GatewayConfig(shutdown_timeout_seconds=0.1)) as gateway:
        gateway.worker.script = [TokenDelta("r", [300]), 60.0]
        answers: list[scripted.Answer] = []
        running = threading.Thread(target=lambda: answers.append(gateway.chat()))
        running.start()
        wait_until(lambda: len(gateway.worker.requests) == 1)
        gateway.server.handle_exit(signal.SIGTERM, None)
        running.join(20)
        assert [(answer.status, answer.json["error"]["code"]) for answer in answers] == [(503, "draining")]
        wait_until(lambda: gateway.worker.num_aborted == 1)


@pytest.mark.ci
def test_whole_process_starts_and_stops_by_signal() -> None:
    program = (
        "import sys, uvloop; from saccade.gateway.app import serve; from saccade.gateway.config import GatewayConfig;"
        "uvloop.run(serve(GatewayConfig(port=int(sys.argv[1]), worker_urls=('unix:/nowhere',), num_decode_processes=1)))"
    )
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )

    def status(path: str) -> int | None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    try:
        wait_until(lambda: status("/live") == 200)
        assert status("/ready") == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not [name for name in os.listdir("/dev/shm") if f"-{process.pid}-" in name]
    finally:
        process.kill()
        process.wait()


def test_taken_port_is_a_startup_error() -> None:
    with app.listen("127.0.0.1", 0) as listener, pytest.raises(StartupError, match="--port"):
        app.listen("127.0.0.1", listener.getsockname()[1])
    with app.listen("127.0.0.1", 0) as listener, pytest.raises(StartupError, match="another --admin-port"):
        app.listen("127.0.0.1", listener.getsockname()[1], "--admin-port")


def test_loopback_is_the_default() -> None:
    assert GatewayConfig().host == "127.0.0.1"
    assert "secret" not in repr(GatewayConfig(api_keys=("secret",)))


def test_openapi_names_every_route(gateway: scripted.Gateway) -> None:
    document = gateway.ask("GET", "/openapi.json").json
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize", "/live", "/ready", "/health",
        "/ping", "/load", "/metrics", "/version", "/openapi.json", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/invocations", "/pdf_pages/{number}",
    }  # fmt: skip
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references == set(document["components"]["schemas"])


@pytest.mark.parametrize("host", ["name.invalid", "a..b"])
def test_invalid_host_is_one_sentence(host: str) -> None:
    with pytest.raises(StartupError) as failure:
        app.listen(host, 8000)
    sentence = f"Cannot listen on {host}:8000: there is no such host. Choose another --host or --port."
    assert failure.value.message == sentence


def test_idle_connections_are_kept_longer_than_clients_and_proxies_keep_them(gateway: scripted.Gateway) -> None:
    of_nginx = 60
    of_sdks = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert of_sdks is not None
    assert gateway.connections.limits.keep_alive_seconds > max(of_nginx, of_sdks)
