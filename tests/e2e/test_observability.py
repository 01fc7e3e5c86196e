"""Every stage is timed and visible; no label and no log line holds what a user sent. # F10"""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from chats import data_url, random_image
from faults import wait_for
from server import Server
from tables import table
from test_bad_input import post

MARK = "zq7marker"
ENGINE_STAGES = ("queue", "encode", "prefill", "decode")
GATEWAY_STAGES = ("fetch", "decode", "preprocess", "hash", "queue", "route", "tokenize", "write", "media", "prepare")
VLLM_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("mm_cache_queries_total", "mm_cache_hits_total", "request_success_total", "time_to_first_token_seconds_count"),
    *("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count"),
    *("request_prefill_time_seconds_count", "request_decode_time_seconds_count", "request_prompt_tokens_count"),
    *("request_generation_tokens_count", "request_time_per_output_token_seconds_count"),
)


class _Images(http.server.BaseHTTPRequestHandler):
    """Answers every path with one image."""

    def do_GET(self) -> None:
        content = io.BytesIO()
        random_image(64, 64, 1).save(content, "PNG")
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.end_headers()
        self.wfile.write(content.getvalue())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web_port() -> Iterator[int]:
    """The port of a web server with images."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Images) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield web.server_address[1]
        web.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def served(tiny_server: Server, web_port: int) -> Server:
    """A server with a log that has been sent the mark in every way."""
    for body in bodies(f"http://127.0.0.1:{web_port}/{MARK}.png?{MARK}"):
        post(tiny_server, body, tiny_server.key)
    return tiny_server


def bodies(url: str) -> Iterator[dict[str, Any] | bytes]:
    """Requests that carry the mark, good and bad."""
    for source in (
        url,
        data_url(random_image(64, 96, 2)),
        f"https://{MARK}.invalid/a.png",
        f"data:image/png;base64,{MARK}=",
    ):
        image = {"type": "image_url", "image_url": {"url": source}}
        content = [{"type": "text", "text": f"What is {MARK}?"}, image]
        messages = [{"role": "system", "content": MARK}, {"role": "user", "content": content, "name": MARK}]
        body = {"model": "tiny", "messages": messages, "user": MARK, "stop": [MARK], "max_tokens": 3}
        yield body
    yield body | {"model": MARK}
    yield body | {"unheard_of": MARK}
    yield body | {"temperature": MARK}
    yield body | {"cache_salt": MARK, "metadata": {MARK: MARK}}
    yield f"{{{MARK}".encode()


def request_lines(server: Server) -> list[dict[str, Any]]:
    assert server.log is not None
    lines = [line for line in server.log.read_text().splitlines() if line.startswith('{"')]
    return [json.loads(line) for line in lines]


@table("stage", GATEWAY_STAGES)
def test_stage_of_the_gateway_is_timed(served: Server, stage: str) -> None:
    assert served.metric("saccade_stage_seconds_count", stage=stage) > 0


@table("stage", ENGINE_STAGES)
def test_stage_of_the_engine_is_timed(served: Server, stage: str) -> None:
    assert served.metric("saccade_engine_stage_seconds_count", stage=stage) > 0


def test_names_are_those_of_vllm(served: Server) -> None:
    for name in VLLM_NAMES:
        assert served.metric(f"vllm:{name}") >= 0


def test_encoder_cache_queries_equal_hits_and_encodings(served: Server) -> None:
    served.settled("vllm:mm_cache_queries_total")
    queries, encoded = served.metric("vllm:mm_cache_queries_total"), served.metric("saccade_encoded_items_total")
    assert queries == encoded + served.metric("vllm:mm_cache_hits_total") > 0
    assert served.metric("saccade_encoder_cache_bytes") > 0


def test_labels_and_log_lines_have_no_user_content(served: Server) -> None:
    with served.client(default_headers={"x-tenant": MARK, "user-agent": MARK}) as client:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": MARK}], max_tokens=1)
        client.get(f"{served.url}/metrics?{MARK}", cast_to=str)
    assert MARK not in served.metrics().lower()
    assert served.log is not None
    assert MARK not in served.log.read_text().lower()


def test_one_log_line_tells_of_a_request(served: Server) -> None:
    with served.client(default_headers={"x-request-id": "one-request"}) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1
        )

    def lines() -> list[dict[str, Any]]:
        return [line for line in request_lines(served) if line.get("request_id") == "one-request"]

    wait_for(lines)  # It is written when the answer has been sent.
    (line,) = lines()
    assert (line["event"], line["status"], line["id"]) == ("request", 200, answer.id)
